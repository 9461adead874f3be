"""Results and progress of the trials of a sweep, from each trial's own metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import InputError
from dtt.config.explain import scalar
from dtt.config.load import load_job
from dtt.jobs import job_state
from dtt.jobs.job_files import first_line
from dtt.jobs.job_state import State, Status
from dtt.jobs.sweep_trials import Sweep
from dtt.track import jsonl
from dtt.track.plot import Curve


@dataclass(frozen=True)
class ResultRow:
    """The aggregated result of trials that differ only in their seed."""

    values: dict[str, Any]
    """Values of the swept keys, without the seed."""
    trials: tuple[str, ...]
    done: tuple[str, ...]
    """Trials that finished successfully and measured the metric; only they count."""
    mean: float | None
    """Mean of the metric; None if no trial counts."""
    error: float | None
    """Standard error of the mean; None for fewer than two trials."""


@dataclass(frozen=True)
class TrialProgress:
    """The progress of a trial."""

    trial: str
    values: dict[str, Any]
    state: State
    alive: bool
    """True if the trial is running."""
    queued: bool
    """True if the trial waits in Slurm's queue."""
    slurm: str | None
    """Slurm's job id, if Slurm knows the trial."""
    step: int | None
    """Last step with a record in metrics.jsonl; None before the first."""
    steps: int
    """Total number of steps of the run."""
    metric: float | None
    """Newest value of the metric; None before the first."""
    error: str | None
    """Description of a failure, in one line; None if there was none."""
    code: int
    """Exit code of the last attempt; 0 if there is none."""

    @property
    def active(self) -> bool:
        """True if the trial is running or queued."""
        return self.alive or self.queued


def progress(sweep: Sweep) -> list[TrialProgress]:
    """Return every trial's progress, from its own files and, if inconclusive, from Slurm."""
    statuses = job_state.examine([sweep.job(trial) for trial in sweep.manifest.trials])
    return [
        _progress(sweep, trial, status)
        for trial, status in zip(sweep.manifest.trials, statuses, strict=True)
    ]


def _progress(sweep: Sweep, trial: str, status: Status) -> TrialProgress:
    job, state = status.job, status.state
    attempt, active = job.attempt(), status.alive or status.queued
    if attempt == 0 and job.stop.exists() and not active:
        state = State.CANCELLED  # before its first attempt
    ending = job.exit_record(attempt) if attempt else None
    error = None
    if not active and state not in (State.NEW, State.UNSENT, State.DONE, State.CANCELLED):
        # Without a record of the end, the status and the last line of the log may tell.
        texts = [status.detail, *status.log_tail[-1:]]
        error = first_line(ending["reason"]) if ending else "; ".join(filter(None, texts)) or None
    points = measured(job, sweep.manifest.metric)
    return TrialProgress(
        trial=trial,
        values=sweep.manifest.trials[trial].values,
        state=state,
        alive=status.alive,
        queued=status.queued,
        slurm=status.slurm.id if status.slurm else None,
        step=job.last_step(),
        steps=load_job(job.root).train.steps,
        metric=points[-1][1] if points else None,
        error=error,
        code=ending["code"] if ending else 0,
    )


def measured(job: JobDir, metric: str) -> list[tuple[int, float]]:
    """Return every finite `(step, value)` of a metric such as `eval.loss`."""
    kind, field = metric.split(".")
    return [
        (record["step"], record[field])
        for record in jsonl.read(job.metrics, kind)
        if isinstance(record.get(field), int | float) and math.isfinite(record[field])
    ]


def table(sweep: Sweep) -> list[ResultRow]:
    """Return the rows, best first; rows without a finished trial come last."""
    groups: dict[str, list[TrialProgress]] = {}
    for one in progress(sweep):
        groups.setdefault(fingerprint(_without_seed(one.values)), []).append(one)
    rows = []
    for trials in groups.values():
        last = {
            one.trial: one.metric
            for one in trials
            if one.state == State.DONE and one.metric is not None
        }
        error = stdev(last.values()) / math.sqrt(len(last)) if len(last) > 1 else None
        rows.append(
            ResultRow(
                values=_without_seed(trials[0].values),
                trials=tuple(one.trial for one in trials),
                done=tuple(last),
                mean=fmean(last.values()) if last else None,
                error=error,
            )
        )
    sign = 1 if sweep.manifest.goal == "min" else -1
    return sorted(rows, key=lambda row: math.inf if row.mean is None else sign * row.mean)


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "seed"}


def varied(sweep: Sweep) -> list[str]:
    """Return the swept keys except the seed, which are the columns of the results."""
    return [key for key in sweep.manifest.keys if key != "seed"]


def cells(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return the values of these keys, each as one line of YAML."""
    return [scalar(values[key]) for key in keys]


def label(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the values of these keys in one line: `optim.lr=0.001, model.dim=64`."""
    return ", ".join(f"{key}={scalar(values[key])}" for key in keys)


def against(sweep: Sweep, rows: Sequence[ResultRow], key: str) -> list[Curve]:
    """Return the metric as a function of a key: a curve for each combination of the other keys.

    Raises InputError if no trial has finished.
    """
    others = [other for other in varied(sweep) if other != key]
    points = [(_coordinate(row.values[key]), row) for row in rows if row.mean is not None]
    if not points:
        raise InputError(
            f"there is nothing to plot in {sweep.root}",
            why=f"no finished trial has measured {sweep.manifest.metric}",
            next=f"dtt sweep status {sweep.root}",
        )
    # Numbers come first, because Python does not compare them with text.
    points.sort(key=lambda point: (isinstance(point[0], str), point[0]))
    groups: dict[str, list[tuple[float | str, ResultRow]]] = {}
    for x, row in points:
        groups.setdefault(label(row.values, others), []).append((x, row))
    return [
        Curve(
            label=name,
            x=[x for x, _ in group],
            y=[row.mean for _, row in group if row.mean is not None],
            error=[row.error or 0.0 for _, row in group],
        )
        for name, group in sorted(groups.items())
    ]


def _coordinate(value: Any) -> float | str:
    """Return a value as a coordinate of a plot: a number, or its text on a categorical axis."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number else scalar(value)


def histories(sweep: Sweep, metric: str) -> list[Curve]:
    """Return a metric over the steps: a curve for each trial that has measured it."""
    curves = []
    for trial, record in sweep.manifest.trials.items():
        points = measured(sweep.job(trial), metric)
        if points:
            steps, values = zip(*points, strict=True)
            curves.append(Curve(label(record.values, record.values), steps, values))
    return curves
