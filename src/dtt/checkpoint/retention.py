"""Retention of checkpoints: the rules for keeping and deleting them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.files import remove, write_atomically
from dtt.base.log import log
from dtt.base.reading import fits, read_record, read_records, retrying
from dtt.checkpoint import store
from dtt.config.train import CheckpointConfig


def kept(
    folder: Path,
    rules: CheckpointConfig,
    diverged: int | None,
    losses: Mapping[int, float],
    steps: Sequence[int] | None = None,
) -> set[int]:
    """Return the steps to keep: those selected by the rules, and the newest up to `diverged`.

    `losses` are the validation losses by step, as `eval_losses` returns them. `steps` are those to
    choose from, ascending; None: those in `folder`.

    The rules always keep the newest checkpoint, and those that adapters of other jobs need.
    `diverged` is the step before the latest divergence, or None if there was none: weights after it
    may already have been diverging, so the newest checkpoint from before is kept, too.
    """
    steps, needed = store.steps(folder) if steps is None else steps, dependents(folder)
    # The newest one is among them, as keep_last is at least 1.
    keep = set(steps[-rules.keep_last :]) | {step for step in steps if step in needed}
    if rules.keep_every:
        # Step 0 is a multiple of every number, but nothing was trained by then.
        keep |= {step for step in steps if step and step % rules.keep_every == 0}
    if rules.keep_best:
        # Ties go to the earlier step, which is the first in the order.
        scored = sorted((losses[s], s) for s in steps if math.isfinite(losses.get(s, math.inf)))
        keep |= {step for _, step in scored[: rules.keep_best]}
    # Weights may have started to diverge before the guard noticed.
    if diverged is not None:
        keep |= set([step for step in steps if step <= diverged][-1:])
    return keep


def eval_losses(job: JobDir) -> dict[int, float]:
    """Return the finite validation losses by step.

    A checkpoint is saved before its step is evaluated, so they are in metrics.jsonl.
    """
    records = read_records(job.metrics, {"kind": str, "step": int}, mark=b'"eval"')
    measured = {"loss": float}  # null, if it is not finite
    return {r["step"]: r["loss"] for r in records if r["kind"] == "eval" and fits(r, measured)}


def note_dependent(checkpoint: Path, job: Path) -> None:
    """Record beside `checkpoint` that the adapter of `job` needs its weights.

    Logs a warning if its job belongs to somebody else who may not be written to.
    """
    path = str(job.resolve())
    record = {"job": path, "step": int(checkpoint.name.removeprefix(store.PREFIX))}
    # One record for each job and step: a job may be trained again from another step.
    name = f"{checkpoint.name}-{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    try:
        folder = JobDir(checkpoint.parents[1]).dependents
        write_atomically(folder / name, json.dumps(record) + "\n")
    except OSError as error:
        log.warning(
            "the retention of %s does not know that this job needs %s, and may delete it: %s; "
            "copy that job, or ask its owner to set checkpoint.keep_every",
            checkpoint.parents[1],
            checkpoint.name,
            error.strerror,
        )


def dependents(folder: Path) -> dict[int, list[str]]:
    """Return the jobs whose adapters need a checkpoint in `folder`, by its step.

    Jobs that do not exist any more are left out, and so are damaged records.
    """
    found: dict[int, list[str]] = {}
    for path in sorted(JobDir(folder.parent).dependents.glob("*.json")):
        record = read_record(path, {"job": str, "step": int})
        if record is None:
            continue
        try:
            exists = JobDir(Path(record["job"])).exists
        except OSError:  # a folder of somebody else that may not be read
            exists = True
        if exists:
            found.setdefault(record["step"], []).append(record["job"])
    return found


def check_dependents(job: JobDir, *, after: int = -1) -> None:
    """Raise ConfigError if adapters need checkpoints of `job` of steps after `after`."""
    needed = {step: jobs for step, jobs in dependents(job.checkpoints).items() if step > after}
    if needed:
        step, jobs = min(needed.items())
        raise ConfigError(
            f"the adapter of {jobs[0]} needs the weights of step {step} of {job.root}",
            why="a checkpoint of an adapter does not contain the frozen weights",
            next=f"delete the adapter first, if its export is all you need: dtt job rm {jobs[0]}",
        )


def prune(
    folder: Path,
    rules: CheckpointConfig,
    diverged: int | None = None,
    losses: Mapping[int, float] | None = None,
    also: Container[int] = (),
) -> list[int]:
    """Delete the checkpoints that `kept` does not select, and return their steps.

    Those of the steps `also` stay for now. Call this only after the newest checkpoint has been
    verified.
    """
    keep = kept(folder, rules, diverged, losses or {})
    gone = [step for step in store.steps(folder) if step not in keep and step not in also]
    for step in gone:
        delete(store.folder_of(folder, step))
    return gone


def delete(path: Path) -> None:
    """Delete a checkpoint.

    It is renamed first, so that an interrupted deletion never leaves a checkpoint that looks
    complete.
    """
    doomed = path.with_name(f"{store.STAGING_PREFIX}{path.name}-pruned")
    path.rename(doomed)
    remove(doomed)


def sweep_staging(folder: Path) -> None:
    """Delete leftovers of interrupted saves and deletions.

    Call this only while no other process writes to `folder`.
    """
    for path in folder.glob(f"{store.STAGING_PREFIX}*"):
        retrying(partial(remove, path))
