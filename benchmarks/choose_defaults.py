"""Choose the quickstart's defaults by measurement, as planned in benchmarks/choose_defaults.yaml.

    python benchmarks/choose_defaults.py PHASE [--work DIR] [--smoke]

PHASE is noise, screen, confirm, transfer, all of them in this order (`all`), or `report`, which
prints the results so far as Markdown. Run nothing else meanwhile. The novels of `transfer` are in
`$DTT_SHARED/data` (`../shared` by default).

Each run is a `dtt train` job in DIR/jobs/PHASE/, one at a time on all cores. A phase that was
stopped or killed continues when it is started again: finished runs are never repeated, and the
current run resumes from its last checkpoint. DIR/measurement.json records commit, plan and token
files of the first run; a phase refuses to train with another plan, source, configuration, data,
torch or number of cores. `--smoke` trains tiny models for 4 steps on synthetic text, with fewer
seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import yaml
from jobs import DTT, SHARED_DATA, dtt, make_tokens
from trial_statistics import Estimate, main_effects, plackett_burman

from dtt.config.load import load_job
from dtt.errors import ConfigError, DamagedError, DttError, ExitCode, InputError
from dtt.launch import local
from dtt.runtime.files import append, exclusive, write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.track import jsonl

ROOT = Path(__file__).resolve().parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
TODAY = "today"
Levels = tuple[int, ...]
"""A setting: for each factor, -1 (the level of today's defaults) or +1."""


@dataclass(frozen=True)
class Plan:
    """The content of choose_defaults.yaml."""

    text: bytes
    smoke: bool

    @cached_property
    def content(self) -> dict[str, Any]:
        """The parsed file; with `smoke`, fewer seeds."""
        content: dict[str, Any] = yaml.safe_load(self.text)
        if self.smoke:
            content["common"] |= content["smoke"]["common"]
            for phase in content["phases"].values():
                phase["seeds"] = phase["seeds"][: content["smoke"]["seeds"]]
        return content

    @property
    def sha256(self) -> str:
        """Hash of the file."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def factors(self) -> list[str]:
        """Names of the factors, in the order of the columns of the design."""
        return list(self.content["factors"])

    @property
    def today(self) -> Levels:
        """The setting of today's defaults."""
        return (-1,) * len(self.factors)

    @property
    def design(self) -> list[Levels]:
        """The settings of the screen: the columns of the design that have a factor."""
        return [row[: len(self.factors)] for row in plackett_burman()]

    def level(self, factor: str, sign: int, phase: str = "screen") -> str:
        """Return the text of a level; a phase may name another one for today's."""
        if sign < 0 and factor in (own := self.content["phases"][phase].get("today", {})):
            return str(own[factor])
        return str(self.content["factors"][factor]["levels"][sign > 0])

    def overrides(self, phase: str, levels: Levels, seed: int) -> dict[str, str]:
        """Return the values of all keys that the plan sets in a run."""
        texts = {
            factor: self.level(factor, sign, phase)
            for factor, sign in zip(self.factors, levels, strict=True)
        }
        settings = {key: form.format(**texts) for key, form in self.content["settings"].items()}
        common = {key: str(value) for key, value in self.content["common"].items()}
        return {"seed": str(seed)} | settings | common

    def changes(self, levels: Levels) -> str:
        """Describe a setting by the factors that are not at today's level."""
        changed = [
            " ".join(dict.fromkeys([factor, self.level(factor, sign).strip()]))
            for factor, sign in zip(self.factors, levels, strict=True)
            if sign > 0
        ]
        return ", ".join(changed) or "today's settings"


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    curve: list[tuple[int, float]]
    """(step, validation loss in nats per token)."""
    step_seconds: float
    """Median time of a training step, without evaluations and checkpoints."""
    finished: bool
    """False if the run diverged."""

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]


@dataclass(frozen=True)
class Trial:
    """A planned run."""

    phase: str
    setting: str
    levels: Levels
    seed: int

    @property
    def name(self) -> str:
        """Name of the job."""
        return f"{self.phase}/{self.setting}-{self.seed}"


class Measurement:
    """All runs of a plan in one folder."""

    def __init__(self, plan: Plan, work: Path) -> None:
        self.plan, self.work = plan, work.absolute()
        self._outcomes: dict[Trial, Outcome] = {}

    # ---- what is run ---------------------------------------------------------------------------

    def trials(self, phase: str) -> list[Trial]:
        """Return the runs of a phase, all settings of one seed after another.

        Raises InputError if an earlier phase, which determines the settings, is not complete.
        """
        return [
            Trial(phase, setting, levels, seed)
            for seed in self.plan.content["phases"][phase]["seeds"]
            for setting, levels in self.settings(phase).items()
        ]

    def settings(self, phase: str) -> dict[str, Levels]:
        """Return the settings of a phase by name."""
        today = {TODAY: self.plan.today}
        if phase == "screen":
            return {f"row{i:02}": row for i, row in enumerate(self.plan.design, 1)}
        if phase == "confirm":
            return today | self.candidates()
        if phase == "transfer":
            better = self.better_candidate()
            return today | {better: self.candidates()[better]}
        return today

    def job(self, trial: Trial) -> JobDir:
        """Return the job directory of a run."""
        return JobDir(self.work / "jobs" / trial.name)

    # ---- what came out -------------------------------------------------------------------------

    def outcome(self, trial: Trial) -> Outcome | None:
        """Return the result of a run; None if it has not finished."""
        if trial not in self._outcomes:
            job = self.job(trial)
            record = job.exit_record(job.attempt()) if job.attempt() else None
            if record is None or record["code"] not in (ExitCode.DONE, ExitCode.DIVERGED):
                return None
            curve = [
                (r["step"], float(r["loss"]))
                for r in jsonl.read(job.metrics, "eval")
                if r["loss"] is not None
            ]
            done = record["code"] == ExitCode.DONE
            steps = load_job(job.root).train.steps
            if done and (not curve or curve[-1][0] != steps):
                raise DamagedError(
                    f"{job.root} has finished without the validation loss of step {steps}",
                    next="move the job away, and run the phase again",
                )
            seconds = [r["seconds_per_step"] for r in jsonl.read(job.metrics, "perf")]
            self._outcomes[trial] = Outcome(curve, statistics.median(seconds or [math.nan]), done)
        return self._outcomes[trial]

    def outcomes(self, phase: str) -> dict[str, list[Outcome]]:
        """Return the results of a complete phase by setting, in the order of its seeds."""
        found: dict[str, list[Outcome]] = {}
        for trial in self.trials(phase):
            outcome = self.outcome(trial)
            if outcome is None:
                raise InputError(
                    f"the phase {phase} is not complete: {trial.name} has not finished",
                    next=f"python benchmarks/choose_defaults.py {phase}",
                )
            found.setdefault(trial.setting, []).append(outcome)
        return found

    def losses(self, phase: str) -> dict[str, list[float]]:
        """Return the last validation losses of a complete phase by setting."""
        return {name: [o.loss for o in each] for name, each in self.outcomes(phase).items()}

    # ---- the rule ------------------------------------------------------------------------------

    def effects(self) -> list[Estimate]:
        """Return the main effects of all columns of the design, in nats."""
        return main_effects(plackett_burman(), list(self.losses("screen").values()))

    def candidates(self) -> dict[str, Levels]:
        """Return the two settings to confirm, by the rule of the plan."""
        factors = len(self.plan.factors)
        confidence = self.plan.content["confidence"]
        effects = self.effects()[:factors]
        lower = tuple(1 if e.value < 0 else -1 for e in effects)
        proven = tuple(1 if e.interval(confidence)[1] < 0 else -1 for e in effects)
        losses = self.losses("screen")
        rows = self.settings("screen")
        ranked = [rows[name] for name in sorted(rows, key=lambda n: statistics.fmean(losses[n]))]
        distinct = [s for s in dict.fromkeys([lower, proven, *ranked]) if s != self.plan.today]
        return {"first": distinct[0], "second": distinct[1]}

    def better_candidate(self) -> str:
        """Return the candidate with the lower mean loss in the confirmation."""
        losses = self.losses("confirm")
        return min(self.candidates(), key=lambda name: statistics.fmean(losses[name]))

    # ---- training ------------------------------------------------------------------------------

    def run(self, phase: str) -> None:
        """Train all runs of a phase that have not finished."""
        self.work.mkdir(parents=True, exist_ok=True)
        with exclusive(self.work, "a phase of the measurement"):
            self.check_unchanged()
            config = self.plan.content["phases"][phase]["config"]
            tokens = self.tokens(config)
            trials = self.trials(phase)
            for number, trial in enumerate(trials, 1):
                if self.outcome(trial) is None:
                    self._train(trial, config, tokens)
                outcome = self.outcome(trial)
                assert outcome is not None
                print(f"{number}/{len(trials)} {trial.name}: {outcome.loss:.4f}", flush=True)

    def _train(self, trial: Trial, config: str, tokens: Path) -> None:
        """Start or resume a run, and record it."""
        values = {"name": trial.name, "data.tokens": str(tokens)}
        values |= self.plan.overrides(trial.phase, trial.levels, trial.seed)
        arguments = ["-c", config, *(f"{key}={value}" for key, value in values.items())]
        log = self.work / "logs" / f"{trial.name.replace('/', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        busy = psutil.cpu_percent(interval=0.1 if self.plan.smoke else 2.0)
        began = time.time()
        command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *DTT, "train", *arguments]
        with log.open("a") as output:
            code = local.run(command, self._environment(), stdout=output)
        record = {
            "run": trial.name, "busy_percent": busy, "time": round(began),
            "seconds": round(time.time() - began, 1), "code": code,
            "commit": git("rev-parse", "HEAD"),
        }  # fmt: skip
        append(self.work / "runs.jsonl", json.dumps(record) + "\n")
        if code not in (ExitCode.DONE, ExitCode.DIVERGED):
            print(f"{trial.name} ended with exit code {code}: see {log}", file=sys.stderr)
            sys.exit(code)

    def _environment(self) -> dict[str, str]:
        """Return the environment of runs: all cores, nothing from the network."""
        threads = "1" if self.plan.smoke else str(local.cores())
        return os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}

    # ---- what must not change ------------------------------------------------------------------

    @property
    def _record(self) -> Path:
        return self.work / "measurement.json"

    def recorded(self) -> dict[str, Any]:
        """Return the record of the first run; empty before it."""
        if not self._record.exists():
            return {}
        record: dict[str, Any] = json.loads(self._record.read_text())
        return record

    def check_unchanged(self) -> None:
        """Raise ConfigError if the plan, or what determines losses, is not that of the first run.

        Before the first run, record it; then the plan must be committed.
        """
        present = self._present()
        recorded = self.recorded()
        changed = [key for key in present if recorded and recorded.get(key) != present[key]]
        if changed:
            raise ConfigError(
                f"since the first run in {self.work}, these have changed: {', '.join(changed)}",
                why="runs of one measurement differ in the planned settings and seeds only",
                next=f"check out commit {recorded['commit']}, or start again with another --work",
            )
        edited = git("status", "--porcelain", "--", "src", "configs", *_files())
        if edited and not self.plan.smoke:
            raise ConfigError(
                "the plan, the script or dtt has changes that are not committed",
                why=", ".join(edited.split()[1::2]),
                next="commit them before the first run",
            )
        if not recorded:
            self._write(present | {"commit": git("rev-parse", "HEAD"), "tokens": {}})

    def check_plan(self) -> None:
        """Raise ConfigError if the plan is not that of the first run."""
        recorded = self.recorded()
        if recorded and recorded["plan"] != self.plan.sha256:
            raise ConfigError(
                f"{PLAN} has changed since the first run in {self.work}",
                next=f"git checkout {recorded['commit']} -- {PLAN.relative_to(ROOT)}",
            )

    def _present(self) -> dict[str, str]:
        return {
            "plan": self.plan.sha256,
            "smoke": str(self.plan.smoke),
            "src": git("rev-parse", "HEAD:src"),
            "configs": git("rev-parse", "HEAD:configs"),
            "torch": metadata.version("torch"),
            "cores": str(local.cores()),
        }

    def _write(self, record: Mapping[str, Any]) -> None:
        write_atomically(self._record, json.dumps(record, indent=1) + "\n")

    def tokens(self, config: str) -> Path:
        """Return the token files of a configuration; create them first if they do not exist.

        Raises DamagedError if their manifest is not that of the first run.
        """
        folder = self.work / "data" / config
        manifest = folder / "tokens" / "manifest.json"
        if not manifest.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._tokenize(config, folder)
        sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
        record = self.recorded()
        if record["tokens"].setdefault(config, sha256) != sha256:
            raise DamagedError(
                f"{manifest} is not that of the first run", next="restore it, or use another --work"
            )
        self._write(record)
        return manifest.parent

    def _tokenize(self, config: str, folder: Path) -> None:
        if self.plan.smoke:
            make_tokens(folder)
            return
        dataset = self.plan.content["phases"]["transfer"]["config"] == config
        source = ["-d", SHARED_DATA.resolve() / "novels"] if dataset else []
        dtt("download", "-c", config, *source, folder=folder)
        dtt("tokenize", "-c", config, *source, "tokenize.out=tokens", folder=folder)

    def run_records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all runs that were started, with repetitions of resumed ones."""
        path = self.work / "runs.jsonl"
        if path.exists():
            yield from map(json.loads, path.read_text().splitlines())


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _files() -> list[str]:
    """Return the files of this measurement: its script, plan, report and statistics."""
    folder = Path(__file__).resolve().parent
    names = (
        "choose_defaults.py",
        "choose_defaults.yaml",
        "defaults_report.py",
        "trial_statistics.py",
    )
    return [str(folder / name) for name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    from defaults_report import report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    phases = ("noise", "screen", "confirm", "transfer")
    parser.add_argument("phase", choices=(*phases, "report", "all"))
    parser.add_argument("--work", type=Path, help="folder of the runs (default: choose-defaults)")
    parser.add_argument("--smoke", action="store_true", help="run 4 steps of tiny models")
    given = parser.parse_args(arguments)
    work = given.work or Path("choose-defaults-smoke" if given.smoke else "choose-defaults")
    measurement = Measurement(Plan(PLAN.read_bytes(), given.smoke), work)
    try:
        measurement.check_plan()
        wanted = phases if given.phase == "all" else (given.phase,)
        if given.phase != "report":
            measurement.work.mkdir(parents=True, exist_ok=True)
            os.chdir(measurement.work)
        for phase in (p for p in wanted if p in phases):
            measurement.run(phase)
        if given.phase in ("report", "all"):
            print(report(measurement))
    except DttError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
