"""The trials of a sweep, planned from a sweep file and stored in a manifest.

A trial is a separate job, `jobs/<sweep>/<trial>/`. The manifest, not its name, records the values
it sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import Manifest, Record, fingerprint
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import write_atomically
from dtt.config import explain, load
from dtt.config.load import Mistakes, ModelOf, changes_on_resume, load_job
from dtt.config.merging import Resolved
from dtt.config.own import kept_files
from dtt.config.source import SUFFIXES, Leaf
from dtt.config.sweep import SweepConfig, SweepFile, combinations, read


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
    logarithmic: tuple[str, ...]
    """Keys whose values are spread logarithmically."""
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
class DroppedCombination:
    """A combination of values that yields no trial."""

    values: dict[str, Any]
    why: str


@dataclass(frozen=True)
class SweepPlan:
    """A planned sweep: every combination of the sweep file is either a trial or dropped."""

    file: SweepFile
    trials: tuple[Trial, ...]
    dropped: tuple[DroppedCombination, ...]

    @property
    def root(self) -> Path:
        """The folder of the sweep."""
        return Path("jobs") / self.file.sweep.name

    def write(self) -> Sweep:
        """Write the job directories and, last, the manifest; earlier trials are kept."""
        for trial in self.trials:
            text = explain.show(trial.resolved)
            folder = trial.resolved.config.job_dir
            for path, content in kept_files(trial.resolved.config, folder).items():
                write_atomically(path, content)
            write_atomically(JobDir(folder).config, text)
        sweep = self.file.sweep
        records = {t.id: TrialRecord(values=t.values, folder=t.id) for t in self.trials}
        manifest = SweepManifest(
            name=sweep.name,
            source=str(self.file.path),
            keys=sweep.keys,
            logarithmic=tuple(k for k, v in sweep.parameters.items() if v.kind in LOGARITHMIC),
            metric=sweep.metric,
            goal=sweep.goal,
            concurrency=sweep.concurrency,
            trials=_recorded(self.root) | records,
        )
        write_atomically(self.root / manifest.filename, manifest.dump())
        return Sweep(self.root, manifest)


LOGARITHMIC = ("logspace", "loguniform")


def _recorded(root: Path) -> dict[str, TrialRecord]:
    """Return the trials of the sweep in a folder; empty if there is no sweep."""
    return SweepManifest.read(root).trials if SweepManifest.exists(root) else {}


def plan(path: Path, model_of: ModelOf | None = None, profile: Path | None = None) -> SweepPlan:
    """Plan the trials of a sweep file, on the cluster of `profile`; writes nothing.

    `model_of` has the same meaning as for `resolve`. A combination is dropped with a reason if its
    configuration is invalid or equals another one. Raises ConfigError if no trial is left, if there
    are more than `max_trials`, or if the folder contains another sweep.
    """
    file = read(path)
    if profile is not None:
        file = file.on_cluster(profile)
    root = Path("jobs") / file.sweep.name
    _check_folder(root, file)
    # The id of a trial is a number and a hash of its values; a known trial keeps its id. Numbers go
    # on after the largest one, not after the number of trials: some were never created.
    ids = {fingerprint(record.values): id for id, record in _recorded(root).items()}
    numbers = (id.partition("-")[0] for id in ids.values())
    free = count(max((int(n) for n in numbers if n.isdecimal()), default=0) + 1)
    trials: dict[str, Trial] = {}
    dropped: list[DroppedCombination] = []
    for values in combinations(file.sweep):
        try:
            resolved = file.resolve(values, f"{file.sweep.name}/trial", model_of)
        except Mistakes as error:
            whys = (f"{'.'.join(key)}: {why}" for key, why in error.problems)
            dropped.append(DroppedCombination(values, "; ".join(whys)))
            continue
        same = fingerprint(resolved.config.model_dump(mode="json"))
        if same in trials:
            dropped.append(DroppedCombination(values, f"is identical to {trials[same].id}"))
            continue
        if (key := fingerprint(values)) not in ids:
            ids[key] = f"{next(free):03d}-{key[:6]}"
        name = Leaf(f"{file.sweep.name}/{ids[key]}", resolved.origin("name"))
        checked = load.check(resolved.layer | {("name",): name}, type(resolved.config))
        trials[same] = Trial(ids[key], values, replace(checked, dropped=resolved.dropped))
        _check_unchanged(root / ids[key], trials[same])
    _check_number(file.sweep, len(trials), dropped)
    return SweepPlan(file, tuple(trials.values()), tuple(dropped))


def _check_folder(root: Path, file: SweepFile) -> None:
    """Raise ConfigError if the folder of a sweep holds a job, or a sweep over other keys."""
    next = "give the sweep another `name`"
    if JobDir(root).config.exists():
        raise ConfigError(f"{root} is a job", where=file.path, next=next)
    keys = SweepManifest.read(root).keys if SweepManifest.exists(root) else file.sweep.keys
    if set(keys) != set(file.sweep.keys):
        why = f"{root} contains a sweep over different keys: {', '.join(keys)}"
        raise ConfigError(why, where=file.path, next=next)


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


def _check_number(sweep: SweepConfig, number: int, dropped: list[DroppedCombination]) -> None:
    if number == 0:
        reasons = list(dict.fromkeys(one.why for one in dropped))[:5]
        raise ConfigError(
            f"all {len(dropped)} combinations are dropped",
            why="\n         ".join(reasons),
            next="fix the base or the parameters",
        )
    if number > sweep.max_trials:
        raise ConfigError(
            f"{number} trials exceed max_trials = {sweep.max_trials}",
            next=f"set max_trials: {number}, or reduce them with mode: zip or random",
        )


def find(name: str) -> Sweep:
    """Return the sweep of a folder, a name or a sweep file; InputError if there is none."""
    path = Path(name)
    if path.is_file() and path.suffix in (*SUFFIXES, ".py"):
        path = Path("jobs") / read(path).sweep.name
    elif not SweepManifest.exists(path) and "/" not in name:
        path = Path("jobs") / name
    return Sweep(path, SweepManifest.read(path))
