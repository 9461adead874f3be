"""Sweeps: their trials, planned from a sweep file and stored in a manifest, and their results.

A trial is a separate job, `jobs/<sweep>/<trial>/`. The manifest, not its name, records the values
it sets; its progress and results come from its own files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import Manifest, Record, fingerprint
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import write_atomically
from dtt.config import explain, load
from dtt.config.explain import scalar
from dtt.config.layers import SUFFIXES, Leaf
from dtt.config.load import Mistakes, ModelOf, changes_on_resume, load_job
from dtt.config.merging import Resolved
from dtt.config.own import kept_files
from dtt.config.sweep import SweepFile, combinations, read
from dtt.jobs import job_state
from dtt.jobs.job_files import first_line
from dtt.jobs.job_state import State
from dtt.track import jsonl
from dtt.track.plot import Curve


class TrialRecord(Record):
    """A trial in the manifest: the values it sets, and its folder within that of the sweep."""

    values: dict[str, Any]
    folder: str


class SweepManifest(Manifest):
    """The manifest of a sweep: its trials by id.

    `dtt sweep submit` writes it, and extends it when a sweep file with more trials is submitted.
    """

    holds: ClassVar[str] = "sweep"
    made_by: ClassVar[str] = "dtt sweep submit"

    format: Literal["dtt-sweep-1"] = "dtt-sweep-1"
    name: str
    source: str
    """Sweep file as given on the command line."""
    keys: tuple[str, ...]
    """Keys that vary between trials."""
    logarithmic: tuple[str, ...] = ()
    """Keys whose values are spread logarithmically, as earlier versions recorded them."""
    metric: str
    """Metric by which `dtt sweep results` ranks trials."""
    goal: Literal["min", "max"]
    concurrency: int | None
    """Number of trials that run at once, or null."""
    trials: dict[str, TrialRecord]
    """The trials, by id."""

    def names(self) -> Iterable[str]:
        """Return the trials' ids and folders."""
        return (name for id, trial in self.trials.items() for name in (id, trial.folder))


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk."""

    root: Path
    manifest: SweepManifest

    def job(self, trial: str) -> JobDir:
        """Return the job directory of a trial."""
        return JobDir(self.root / self.manifest.trials[trial].folder)

    def chosen(self, names: list[str]) -> list[str]:
        """Return the ids of trials named by id or folder, or all if `names` is empty.

        Raises InputError for an unknown trial.
        """
        ids = [Path(name).name for name in names]
        unknown = [trial for trial in ids if trial not in self.manifest.trials]
        if unknown:
            raise InputError(
                f"{self.root} has no trial {', '.join(unknown)}",
                next=f"list trials with dtt sweep status {self.root}",
            )
        return list(dict.fromkeys(ids)) or list(self.manifest.trials)


@dataclass(frozen=True)
class Trial:
    """A planned trial."""

    id: str
    values: dict[str, Any]
    resolved: Resolved


@dataclass(frozen=True)
class SweepPlan:
    """A planned sweep: every combination of the sweep file is either a trial or dropped."""

    file: SweepFile
    trials: tuple[Trial, ...]
    dropped: tuple[tuple[dict[str, Any], str], ...]
    """Values of each combination that yields no trial, and the reason."""

    @property
    def root(self) -> Path:
        """The folder of the sweep."""
        return Path("jobs") / self.file.sweep.name

    def write(self) -> Sweep:
        """Write the job directories and, last, the manifest; earlier trials are kept."""
        for trial in self.trials:
            folder = trial.resolved.config.job_dir
            files = kept_files(trial.resolved.config, folder)
            for path, content in files.items():
                write_atomically(path, content)
            write_atomically(JobDir(folder).config, explain.show(trial.resolved))
        sweep = self.file.sweep
        records = {t.id: TrialRecord(values=t.values, folder=t.id) for t in self.trials}
        manifest = SweepManifest(
            name=sweep.name,
            source=str(self.file.path),
            keys=sweep.keys,
            metric=sweep.metric,
            goal=sweep.goal,
            concurrency=sweep.concurrency,
            trials=_recorded(self.root) | records,
        )
        write_atomically(self.root / manifest.filename, manifest.dump())
        return Sweep(self.root, manifest)


def _recorded(root: Path) -> dict[str, TrialRecord]:
    """Return the trials of the sweep in a folder; empty if there is no sweep."""
    return SweepManifest.read(root).trials if SweepManifest.exists(root) else {}


def plan(path: Path, model_of: ModelOf | None = None, profile: Path | None = None) -> SweepPlan:
    """Plan the trials of a sweep file, on the cluster of `profile`; writes nothing.

    `model_of` has the same meaning as for `resolve`. A combination is dropped with a reason if its
    configuration is invalid or equals another one. Raises ConfigError if no trial is left, or if
    the folder contains another sweep.
    """
    file = read(path)
    if profile is not None:
        file = file.on_cluster(profile)
    root, other = Path("jobs") / file.sweep.name, "give the sweep another `name`"
    if JobDir(root).config.exists():
        raise ConfigError(f"{root} is a job", where=file.path, next=other)
    keys = SweepManifest.read(root).keys if SweepManifest.exists(root) else file.sweep.keys
    if set(keys) != set(file.sweep.keys):
        why = f"{root} contains a sweep over different keys: {', '.join(keys)}"
        raise ConfigError(why, where=file.path, next=other)
    # The id of a trial is a number and a hash of its values; a known trial keeps its id. Numbers go
    # on after the largest one, not after the number of trials: some were never created.
    ids = {fingerprint(record.values): id for id, record in _recorded(root).items()}
    numbers = (id.partition("-")[0] for id in ids.values())
    free = count(max((int(n) for n in numbers if n.isdecimal()), default=0) + 1)
    trials: dict[str, Trial] = {}
    dropped: list[tuple[dict[str, Any], str]] = []
    for values in combinations(file.sweep):
        try:
            resolved = file.resolve(values, f"{file.sweep.name}/trial", model_of)
        except Mistakes as error:
            whys = (f"{'.'.join(key)}: {why}" for key, why in error.problems)
            dropped.append((values, "; ".join(whys)))
            continue
        same = fingerprint(resolved.config.model_dump(mode="json"))
        if same in trials:
            dropped.append((values, f"is identical to {trials[same].id}"))
            continue
        if (key := fingerprint(values)) not in ids:
            ids[key] = f"{next(free):03d}-{key[:6]}"
        name = Leaf(f"{file.sweep.name}/{ids[key]}", resolved.origin("name"))
        checked = load.check(resolved.layer | {("name",): name}, type(resolved.config))
        trials[same] = Trial(ids[key], values, replace(checked, dropped=resolved.dropped))
        _check_unchanged(root / ids[key], trials[same])
    if not trials:
        reasons = list(dict.fromkeys(why for _, why in dropped))[:5]
        raise ConfigError(
            f"all {len(dropped)} combinations are dropped",
            why="\n         ".join(reasons),
            next="fix the base or the parameters",
        )
    return SweepPlan(file, tuple(trials.values()), tuple(dropped))


def _check_unchanged(folder: Path, trial: Trial) -> None:
    """Raise ConfigError if the trial exists with another base configuration."""
    if not JobDir(folder).config.exists():
        return
    changed = changes_on_resume(load_job(folder, run_code=True), trial.resolved.config)
    if changed:
        raise ConfigError(
            f"{folder} was created with different values of: {', '.join(changed)}",
            where=", ".join(dict.fromkeys(trial.resolved.origin(key) for key in changed)),
            why="the trials of a sweep may differ only in its keys",
            next="give the sweep another `name`",
        )


def find(name: str) -> Sweep:
    """Return the sweep of a folder, a name or a sweep file; InputError if there is none."""
    path = Path(name)
    if path.is_file() and path.suffix in SUFFIXES:
        path = Path("jobs") / read(path).sweep.name
    elif not SweepManifest.exists(path) and "/" not in name:
        path = Path("jobs") / name
    return Sweep(path, SweepManifest.read(path))


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
    trials, found = sweep.manifest.trials, []
    statuses = job_state.examine([sweep.job(trial) for trial in trials])
    for trial, status in zip(trials, statuses, strict=True):
        job, state, error = status.job, status.state, None
        attempt, active = job.attempt(), status.alive or status.queued
        if attempt == 0 and job.stop.exists() and not active:
            state = State.CANCELLED  # before its first attempt
        ending = job.exit_record(attempt) if attempt else None
        if not active and state not in (State.NEW, State.DONE, State.CANCELLED):
            # Without a record of the end, the status and the last line of the log may tell.
            texts = [status.detail, *status.log_tail[-1:]]
            error = first_line(ending["reason"]) if ending else "; ".join(filter(None, texts))
        points = measured(job, sweep.manifest.metric)
        found.append(
            TrialProgress(
                trial=trial,
                values=trials[trial].values,
                state=state,
                alive=status.alive,
                queued=status.queued,
                slurm=status.slurm.id if status.slurm else None,
                step=job.last_step(),
                steps=load_job(job.root).train.steps,
                metric=points[-1][1] if points else None,
                error=error or None,
                code=ending["code"] if ending else 0,
            )
        )
    return found


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
    groups: dict[str, tuple[dict[str, Any], list[TrialProgress]]] = {}
    for one in progress(sweep):
        values = {key: value for key, value in one.values.items() if key != "seed"}
        groups.setdefault(fingerprint(values), (values, []))[1].append(one)
    rows = []
    for values, trials in groups.values():
        done = {t.trial: t.metric for t in trials if t.state == State.DONE}
        last = {trial: metric for trial, metric in done.items() if metric is not None}
        error = stdev(last.values()) / math.sqrt(len(last)) if len(last) > 1 else None
        mean = fmean(last.values()) if last else None
        rows.append(ResultRow(values, tuple(t.trial for t in trials), tuple(last), mean, error))
    sign = 1 if sweep.manifest.goal == "min" else -1
    return sorted(rows, key=lambda row: math.inf if row.mean is None else sign * row.mean)


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
    groups: dict[str, list[tuple[float | str, ResultRow]]] = {}
    for row in rows:
        # On a categorical axis, values are texts.
        value, others = row.values[key], [other for other in varied(sweep) if other != key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if row.mean is not None:
            point = value if number else scalar(value), row
            groups.setdefault(label(row.values, others), []).append(point)
    if not groups:
        raise InputError(
            f"there is nothing to plot in {sweep.root}",
            why=f"no finished trial has measured {sweep.manifest.metric}",
            next=f"dtt sweep status {sweep.root}",
        )
    curves = []
    for name, points in sorted(groups.items()):
        # Numbers come first, because Python does not compare them with text.
        points.sort(key=lambda point: (isinstance(point[0], str), point[0]))
        xs, found = zip(*points, strict=True)
        means = [row.mean for row in found]
        curves.append(Curve(name, xs, means, error=[row.error or 0.0 for row in found]))
    return curves


def histories(sweep: Sweep, metric: str) -> list[Curve]:
    """Return a metric over the steps: a curve for each trial that has measured it."""
    curves = []
    for trial, record in sweep.manifest.trials.items():
        points = measured(sweep.job(trial), metric)
        if points:
            steps, values = zip(*points, strict=True)
            curves.append(Curve(label(record.values, record.values), steps, values))
    return curves
