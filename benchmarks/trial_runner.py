"""Train the runs of benchmarks/choose_defaults.py, and record their results in a file of lines.

The first line of the record has what all runs have in common. Each other line is the result of a
finished run: {run, curve, finished, step_seconds, seconds, src, commit}.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs import DTT

from dtt.artifacts.jobdir import JobDir
from dtt.base import local
from dtt.base.errors import ConfigError, DamagedError, ExitCode, InputError
from dtt.base.files import append, write_atomically
from dtt.config.load import load_job
from dtt.track import jsonl

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    curve: list[tuple[int, float]]
    """(step, validation loss in nats per token)."""
    finished: bool
    """False if the run diverged."""
    step_seconds: float
    """Median time of a training step, without evaluations and checkpoints."""
    seconds: float
    """Duration of the process that finished the run."""

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]


@dataclass(frozen=True)
class Trial:
    """A planned run: the name of its job, its configuration, and the values of its keys."""

    name: str
    config: str
    overrides: Mapping[str, str]


class TrialRecord:
    """The file of results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines, the first with what the runs have in common; empty before the first run.

        An unfinished last line, which a crash has left, is ignored.
        """
        if not self.exists():
            return []
        complete, _, _ = self.path.read_text().rpartition("\n")
        return list(map(json.loads, complete.splitlines()))

    @cached_property
    def origin(self) -> dict[str, str]:
        """The version of the source that new runs are trained with."""
        return {"src": git("rev-parse", "HEAD:src"), "commit": git("rev-parse", "HEAD")}

    def exists(self) -> bool:
        """Return whether a run was recorded."""
        return self.path.exists()

    def __getitem__(self, name: str) -> Outcome:
        """Return the result of a run; KeyError if it has not finished."""
        for line in self.lines[1:]:
            if line["run"] == name:
                curve = [(int(step), float(loss)) for step, loss in line["curve"]]
                return Outcome(curve, line["finished"], line["step_seconds"], line["seconds"])
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(line["run"] == name for line in self.lines[1:])

    @property
    def sources(self) -> set[str]:
        """Hashes of the versions of dtt's source that the runs were trained with."""
        return {line["src"] for line in self.lines[1:]}

    def start(self, common: Mapping[str, Any]) -> None:
        """Record what all runs have in common; raise ConfigError if the runs so far have other.

        A key that the first line does not have yet is added to it.
        """
        recorded: dict[str, Any] = self.lines[0] if self.lines else {}
        if changed := [k for k in common if k in recorded and recorded[k] != common[k]]:
            raise ConfigError(
                f"since the first run in {self.path}, these have changed: {', '.join(changed)}",
                why="runs of one measurement differ in the planned settings and seeds only",
                next="restore them, or move the record and WORK away to start again",
            )
        self.lines[:1] = [recorded | dict(common)]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, name: str, outcome: Outcome) -> None:
        """Append the result of a run."""
        line = {"run": name} | asdict(outcome) | self.origin
        append(self.path, json.dumps(line) + "\n")
        self.lines.append(line)


@dataclass(frozen=True)
class TrialRunner:
    """Trains runs in one folder."""

    work: Path
    record: TrialRecord
    threads: int
    """Number of threads of each run."""

    def train(self, trials: Sequence[Trial], tokens: Path) -> None:
        """Train those that have not finished, as many at a time as there are cores for."""
        left = [trial for trial in trials if trial.name not in self.record]
        with ThreadPoolExecutor(max(1, local.cores() // self.threads)) as pool:
            outcomes = pool.map(lambda trial: self.outcome(trial, tokens), left)
            for trial, outcome in zip(left, outcomes, strict=True):
                self.record.add(trial.name, outcome)
                done = len(trials) - len(left) + left.index(trial) + 1
                print(f"{done}/{len(trials)} {trial.name}: {outcome.loss:.4f}", flush=True)

    def outcome(self, trial: Trial, tokens: Path) -> Outcome:
        """Start or resume a run; return its result."""
        values = {"name": trial.name, "data.tokens": str(tokens)} | dict(trial.overrides)
        arguments = ["-c", trial.config, *(f"{key}={value}" for key, value in values.items())]
        log = self.work / "logs" / f"{trial.name.replace('/', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        began = time.time()
        with log.open("a") as output:
            code = subprocess.call(
                [*DTT, "train", *arguments],
                cwd=self.work, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if code not in (ExitCode.DONE, ExitCode.DIVERGED):
            raise InputError(
                f"{trial.name} ended with exit code {code}: see {log}",
                next="run the phase again: it continues",
            )
        return _outcome(self.work / "jobs" / trial.name, code == ExitCode.DONE, began)


def _outcome(root: Path, done: bool, began: float) -> Outcome:
    job = JobDir(root)
    curve = [
        (record["step"], float(record["loss"]))
        for record in jsonl.read(job.metrics, "eval")
        if record["loss"] is not None
    ]
    if done and (not curve or curve[-1][0] != load_job(root).train.steps):
        raise DamagedError(
            f"{root} has finished without the validation loss of its last step",
            next="move the job away, and run the phase again",
        )
    seconds = [record["seconds_per_step"] for record in jsonl.read(job.metrics, "perf")]
    return Outcome(curve, done, statistics.median(seconds), round(time.time() - began, 1))


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
