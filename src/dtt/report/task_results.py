"""Scores of benchmark tasks: those measured while a job trained, and those of `dtt eval`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.base.reading import fits, is_kind
from dtt.checkpoint import store
from dtt.config.evaluation import EvalConfig
from dtt.evaluate.tasks.result_files import (
    SCORING_VERSION,
    SealedResult,
    of_weights,
    read_sealed,
    weights_of,
)
from dtt.track.base import Record

STDERR = "_stderr"
MAX_FILES = 2000
"""Number of result files that are read, of the newest checkpoints: verifying hashes takes time."""


def of_job(
    job: JobDir, records: Sequence[Record], measured: EvalConfig | None = None
) -> list[dict[str, Any]]:
    """Return one curve per task and metric: steps, values and standard errors.

    `records` were measured during training with the options `measured`. The results of `dtt eval`
    with the same options replace those of the same step. Results with others, of averaged weights,
    or of another version of the scores are curves of their own.
    """
    options = _options(measured.model_dump() if measured is not None else {})
    points: dict[tuple[str, str], dict[int, tuple[float, float | None, int | None]]] = {}
    for task, metric, step, value, error, n in [
        *_of_records(records, options),
        *_of_files(job),
    ]:
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


def _of_records(records: Sequence[Record], options: str) -> Iterator[Point]:
    for record in records:
        if not fits(record, {"task": str}):
            continue
        n = record.get("n") if fits(record, {"n": int}) else None
        for name, value in record.items():
            is_score = name not in ("step", "time", "n") and not name.endswith(STDERR)
            if is_score and is_kind(value, float):
                error = record.get(f"{name}{STDERR}")
                error = error if is_kind(error, float) else None
                yield f"{record['task']}{options}", name, record["step"], value, error, n


def _of_files(job: JobDir) -> Iterator[Point]:
    found = [
        (int(step[1]), path)
        for path in job.evals.glob("step-*/*.jsonl")
        if (step := re.fullmatch(r"step-(\d{1,12})", path.parent.name))
    ]
    by_step: dict[int, list[SealedResult]] = {}
    for step_number, path in sorted(found)[-MAX_FILES:]:
        if (sealed := _sealed(path)) is not None:
            by_step.setdefault(step_number, []).append(sealed)
    for step_number, results in by_step.items():
        weights = weights_of(store.folder_of(job.checkpoints, step_number))
        for sealed in of_weights(results, weights):
            task = f"{sealed.result.task}{_options(sealed.header)}"
            for metric, score in sealed.result.scores.items():
                if is_kind(score.value, float):
                    yield task, metric, step_number, score.value, score.stderr, score.n


def _sealed(path: Path) -> SealedResult | None:
    try:
        sealed = read_sealed(path)
    except (DttError, OSError, TypeError, KeyError):
        return None
    return sealed if sealed is not None and fits(sealed.header, {"weights": str}) else None


def _options(header: Mapping[str, Any]) -> str:
    """Return the options that distinguish results of a task: `, 5 shots, averaged weights`."""
    shots, limit, bos = header.get("shots"), header.get("limit"), header.get("bos", "tokenizer")
    scoring = header.get("scoring", SCORING_VERSION)
    texts = {
        f"{shots} shots": isinstance(shots, int) and shots > 0,
        f"limit {limit}": limit is not None,
        f"bos {bos}": bos != "tokenizer",
        "chat": header.get("chat") is not None,
        "averaged weights": header.get("ema"),
        f"scoring {scoring}": scoring != SCORING_VERSION,
    }
    return "".join(f", {text}" for text, differs in texts.items() if differs)
