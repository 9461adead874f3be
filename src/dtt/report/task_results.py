"""Scores of benchmark tasks: those measured while a job trained, and those of `dtt eval`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.base.reading import fits, is_kind
from dtt.evaluate.tasks.result_files import SealedResult, read_sealed
from dtt.track.base import Record

STDERR = "_stderr"
MAX_FILES = 2000
"""Number of result files that are read, of the newest checkpoints: verifying hashes takes time."""


def of_job(job: JobDir, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one curve per task and metric: steps, values and standard errors.

    The results of `dtt eval` replace those of the same step that were measured during training:
    they are of a checkpoint, and more options may differ. Results with another number of examples
    in the prompt, or of averaged weights, are curves of their own.
    """
    points: dict[tuple[str, str], dict[int, tuple[float, float | None, int | None]]] = {}
    for task, metric, step, value, error, n in [*_of_records(records), *_of_files(job)]:
        points.setdefault((task, metric), {})[step] = (value, error, n)
    curves = []
    for (task, metric), by_step in sorted(points.items()):
        steps = sorted(by_step)
        values, errors, counts = zip(*(by_step[step] for step in steps), strict=True)
        curves.append(
            {"task": task, "metric": metric, "steps": steps, "values": values, "errors": errors,
             "n": counts[-1]}
        )  # fmt: skip
    return curves


Point = tuple[str, str, int, float, float | None, int | None]
"""Task, metric, step, value, standard error, and number of questions."""


def _of_records(records: Sequence[Record]) -> Iterator[Point]:
    for record in records:
        if not fits(record, {"task": str}):
            continue
        n = record.get("n") if fits(record, {"n": int}) else None
        for name, value in record.items():
            is_score = name not in ("step", "time", "n") and not name.endswith(STDERR)
            if is_score and is_kind(value, float):
                error = record.get(f"{name}{STDERR}")
                error = error if is_kind(error, float) else None
                yield record["task"], name, record["step"], value, error, n


def _of_files(job: JobDir) -> Iterator[Point]:
    found = [
        (int(step[1]), path)
        for path in job.evals.glob("step-*/*.jsonl")
        if (step := re.fullmatch(r"step-(\d{1,12})", path.parent.name))
        and path.name != "failures.jsonl"
    ]
    for step_number, path in sorted(found)[-MAX_FILES:]:
        sealed = _sealed(path)
        if sealed is None:
            continue
        task = f"{sealed.result.task}{_options(sealed)}"
        for metric, score in sealed.result.scores.items():
            if is_kind(score.value, float):
                yield task, metric, step_number, score.value, score.stderr, score.n


def _sealed(path: Path) -> SealedResult | None:
    try:
        return read_sealed(path)
    except (DttError, OSError, TypeError, KeyError):
        return None


def _options(sealed: SealedResult) -> str:
    """Return the options that distinguish results of a task: `, 5 shots, averaged weights`."""
    header = sealed.header
    shots, ema = header.get("shots"), header.get("ema")
    text = f", {shots} shots" if isinstance(shots, int) and shots else ""
    return text + (", averaged weights" if ema else "")
