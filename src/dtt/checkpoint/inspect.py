"""`dtt ckpt`: list, verify and prune checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DamagedError, DttError, InputError
from dtt.base.files import exclusive
from dtt.base.log import log
from dtt.checkpoint import retention, store
from dtt.config.load import load_job, resolve


def _named(source: str) -> tuple[Path, list[int], bool]:
    """Return the folder of the checkpoints of `JOB` or `JOB@STEP`, the steps, and True for all."""
    folder, step = store.parse(source)
    load_job(folder.parent)
    steps = store.steps(folder)
    if step is not None and step not in steps:
        store.at_step(folder, step)  # raises InputError with the existing steps
    return folder, steps if step is None else [step], step is None


def ls(source: str, *, as_json: bool) -> None:
    """Print one line per checkpoint, oldest first; read the manifests without verifying files.

    `source` is `JOB` or `JOB@STEP`.
    """
    folder, steps, every = _named(source)
    losses = retention.eval_losses(JobDir(folder.parent))
    checkpoints = [_facts(store.folder_of(folder, step), losses.get(step)) for step in steps]
    if every:
        superseded = sorted(folder.glob(f"{store.SUPERSEDED_PREFIX}*"))
        checkpoints += [_facts(path, None) for path in superseded]
    if as_json:
        print(json.dumps(checkpoints, indent=1))
        return
    print(f"{'checkpoint':<28}{'saved':<18}{'GB':>9}{'ranks':>7}{'attempt':>9}  validation loss")
    for facts in checkpoints:
        saved = datetime.fromtimestamp(facts["saved"]).strftime("%Y-%m-%d %H:%M")  # noqa: DTZ006  in the user's local time
        loss = "" if facts["eval_loss"] is None else f"{facts['eval_loss']:.4f}"
        print(
            f"{facts['name']:<28}{saved:<18}{facts['bytes'] / 1e9:>9.3f}"
            f"{facts['world_size'] or '?':>7}{facts['attempt'] or '?':>9}"
            f"  {facts['problem'] or loss}"
        )


def _facts(path: Path, loss: float | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": path.name,
        "saved": path.stat().st_mtime,
        "bytes": sum(file.lstat().st_size for file in path.glob("*")),
        "world_size": None,
        "attempt": None,
        "eval_loss": None,
        "problem": None,
    }
    try:
        manifest = CheckpointManifest.read(path)
    except DttError as error:
        return facts | {"problem": str(error).splitlines()[0]}
    return facts | {
        "world_size": manifest.world_size,
        "attempt": manifest.attempt,
        "eval_loss": loss,
    }


def verify(source: str, *, as_json: bool) -> None:
    """Verify all files of all checkpoints, or of that of a step, against their manifests.

    `source` is `JOB` or `JOB@STEP`. Raises DamagedError, after printing the results, if any file
    differs.
    """
    folder, steps, _ = _named(source)
    results = []
    for one in steps:
        problem = None
        try:
            store.verify(store.folder_of(folder, one))
        except DttError as error:
            if not store.folder_of(folder, one).exists():  # pruned meanwhile: the job is running
                continue
            problem = str(error)
        results.append({"step": one, "whole": problem is None, "problem": problem})
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            print(f"step {result['step']:<10} {result['problem'] or 'verified'}")
    damaged = [result for result in results if not result["whole"]]
    if damaged:
        raise DamagedError(
            f"{len(damaged)} of {len(results)} checkpoints in {folder} are damaged",
            next="training resumes from the newest verified one, which `dtt ckpt prune` keeps",
        )


def prune(job: Path, overrides: Sequence[str], *, dry_run: bool) -> None:
    """Delete superseded checkpoints and those that the retention rules do not keep.

    The rules are those of the job's configuration with `overrides`. The newest verified checkpoint
    always stays, and so does the newest one from before the last divergence.
    """
    load_job(job)
    rules = resolve(
        None, overrides, job_config=job / "config.yaml", run_code=False
    ).config.checkpoint
    places = JobDir(job)
    folder = places.checkpoints
    with nullcontext() if dry_run else exclusive(places.root, "dtt train"):
        newest = store.newest(folder)  # DamagedError if none verifies: then nothing is deleted
        if newest is None:
            raise InputError(f"no checkpoint in {folder}", why="training has not saved one yet")
        keep = retention.kept(
            folder, rules, places.diverged_after(), retention.eval_losses(places)
        ) | {newest.step}
        surplus = [store.folder_of(folder, s) for s in store.steps(folder) if s not in keep]
        surplus += sorted(folder.glob(f"{store.SUPERSEDED_PREFIX}*"))
        for path in surplus:
            print(f"{'would delete' if dry_run else 'deleted'}  {path}")
            if not dry_run:
                retention.delete(path)
        log.info(
            "kept %d checkpoints, %s %d",
            len(keep),
            "would delete" if dry_run else "deleted",
            len(surplus),
        )
