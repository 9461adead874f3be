"""The score of one run, computed from its metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DamagedError
from dtt.base.reading import Kind, fits
from dtt.bench.bench_result import RunResult
from dtt.bench.recipe import ScoreRule
from dtt.track import jsonl

STEP_PARTS = ("data", "forward_backward", "optimizer", "other")
"""Parts of a `perf` record that are time of steps. Its other parts are pauses: evaluations,
samples, saves, profiles."""
START: dict[str, Kind] = {"seconds": dict}
PERF: dict[str, Kind] = {"seconds_per_step": float, "seconds": dict}


def values(metrics: Path, metric: str, tasks: Sequence[str]) -> list[tuple[int, float]]:
    """Return every `(step, value)` of a metric, in the order of the file.

    `metric` is as in `ScoreRule.metric`; `tasks` are the names of all benchmark tasks of the run.
    A mean over tasks is left out where a task has no finite value.
    """
    kind, *rest = metric.split(".")
    if kind == "eval":
        wanted: dict[str, Kind] = {rest[0]: float}
        records = [r for r in jsonl.read(metrics, "eval") if fits(r, wanted)]
        return [(record["step"], float(record[rest[0]])) for record in records]
    named, score = rest
    names = list(tasks) if named == "*" else [named]
    by_step: dict[int, dict[str, float]] = {}
    for record in jsonl.read(metrics, "task"):
        if fits(record, {"task": str, score: float}) and record["task"] in names:
            by_step.setdefault(record["step"], {})[record["task"]] = float(record[score])
    return [
        (step, statistics.fmean(found.values()))
        for step, found in by_step.items()
        if found and len(found) == len(names)
    ]


def first_reached(job: JobDir, rule: ScoreRule, tasks: Sequence[str]) -> int | None:
    """Return the step of the first evaluation that reaches the target; None if there is none."""
    if rule.target is None:
        return None
    points = values(job.metrics, rule.metric, tasks)
    return next((step for step, value in points if rule.reached(value)), None)


def training_seconds(metrics: Path, step: int) -> float | None:
    """Return the seconds of training up to a step; None if no step was measured.

    These are the seconds of steps: data, forward and backward passes, optimizer, and what else the
    loop does in between. Start-up, evaluations, samples, saves and profiles do not count, as the
    `perf` records list them separately. The first step of each attempt, which compiles, counts as
    much as a mean step. So do steps that no record covers, such as those between the last record
    of an attempt that was killed and its last checkpoint.
    """
    seconds, steps, first = 0.0, 0, None
    for record in jsonl.read(metrics):
        if record["kind"] == "start" and fits(record, START):
            first = record["seconds"].get("first step")
        if record["kind"] != "perf" or record["step"] > step or not fits(record, PERF):
            continue
        working = _working(record["seconds"])
        count = round(working / record["seconds_per_step"]) if record["seconds_per_step"] else 0
        if isinstance(first, int | float) and count > 0:
            working, count = working - first, count - 1
        first = None
        seconds, steps = seconds + max(0.0, working), steps + count
    return seconds / steps * step if steps else None


def _working(parts: dict[str, Any]) -> float:
    found = (parts.get(part) for part in STEP_PARTS)
    return sum(seconds for seconds in found if isinstance(seconds, int | float))


def score(job: JobDir, rule: ScoreRule, tasks: Sequence[str], seed: int) -> RunResult:
    """Score a finished run at its first evaluation that reaches the target, else at its last.

    Raises DamagedError if it never measured the metric, or, without a target, not at its end.
    """
    points = values(job.metrics, rule.metric, tasks)
    kind = rule.metric.partition(".")[0]
    last = max((record["step"] for record in jsonl.read(job.metrics, kind)), default=None)
    if not points or (rule.target is None and points[-1][0] != last):
        raise DamagedError(
            f"the run has no score: its last evaluation lacks {rule.metric}",
            where=job.metrics,
            why="no record has it" if not points else f"at step {last} it is not finite",
            next=f"look at the run with dtt report {job.root}, and change its settings",
        )
    step, value = next((p for p in points if rule.reached(p[1])), points[-1])
    best = min if rule.goal == "min" else max
    tokens = [
        record["tokens"]
        for record in jsonl.read(job.metrics, "train")
        if record["step"] == step and fits(record, {"tokens": int})
    ]
    return RunResult(
        job=str(job.root),
        seed=seed,
        attempts=job.attempt(),
        step=step,
        tokens=tokens[-1] if tokens else 0,
        seconds=training_seconds(job.metrics, step),
        value=value,
        reached=None if rule.target is None else rule.reached(value),
        best=best(value for _, value in points),
        beside={name: dict(values(job.metrics, name, tasks)).get(step) for name in rule.beside},
    )
