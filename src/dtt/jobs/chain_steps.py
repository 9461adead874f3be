"""The steps of a chain of Slurm jobs, and their states.

Each step waits for the success of the one before, except the evaluation, which runs beside the
training. `chain.json` in the folder of a chain has the steps only: the state of each is that of its
job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode
from dtt.base.files import write_atomically
from dtt.base.reading import Kind, fits, read_record, read_text
from dtt.config.load import load_job
from dtt.jobs import job_state
from dtt.jobs.job_state import State, Status
from dtt.jobs.slurm import squeue

FILE = "chain.json"
EVAL = "eval"
"""Title of the step that evaluates the checkpoints of the training as they appear."""
ROW: dict[str, Kind] = {"step": str, "job": (str, type(None))}


@dataclass(frozen=True)
class LinkedStep:
    """A step of a chain and its job."""

    title: str
    job: JobDir | None
    """None if it was done before the chain was submitted."""


class Submitted:
    """The Slurm ids for which the next step waits, while the steps of a chain are submitted."""

    def __init__(self, after: Sequence[str]) -> None:
        self._last, self._before_training = list(after), list(after)
        self._training: list[str] = []

    def dependencies(self, title: str) -> tuple[list[str], list[str]]:
        """Return the jobs that must have succeeded before a step, and those that must have started.

        The evaluation also waits for what the training waits for: Slurm takes a job that it has
        cancelled for one that has started.
        """
        if title != EVAL:
            return self._last, []
        return self._before_training, self._training

    def add(self, title: str, id: str) -> None:
        """Note that a step is in the queue."""
        if title == EVAL:
            return
        if title == "train":
            self._before_training, self._training = self._last, [id]
        self._last = [id]


def write(folder: Path, steps: Sequence[LinkedStep]) -> None:
    """Record the steps of a chain, in order."""
    rows = [
        {"step": one.title, "job": one.job and os.path.relpath(one.job.root, folder)}
        for one in steps
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, json.dumps({"steps": rows}, indent=1) + "\n")


def read(folder: Path) -> list[LinkedStep]:
    """Return the steps of the chain in a folder, in order; none if it is not that of a chain."""
    if not (folder / FILE).exists():
        return []
    rows = (read_record(folder / FILE, {"steps": list}) or {"steps": []})["steps"]
    jobs = [row["job"] and JobDir(_beside(folder, row["job"])) for row in rows if fits(row, ROW)]
    return [LinkedStep(row["step"], job) for row, job in zip(rows, jobs, strict=True)]


def _beside(folder: Path, relative: str) -> Path:
    return Path(os.path.normpath(folder / relative))


def examine(steps: Sequence[LinkedStep]) -> list[Status | None]:
    """Return the state of each step; None for a step that was done before.

    A training of several stages is done when all of them are. Before that, its state is that of the
    stage that is next, which its Slurm job trains.
    """
    groups = [
        [one.job, *job_state.stages(one.job.root)] if one.job is not None else [] for one in steps
    ]
    found = iter(job_state.examine([job for group in groups for job in group]))
    return [_of_step([next(found) for _ in group]) for group in groups]


def _of_step(statuses: Sequence[Status]) -> Status | None:
    if len(statuses) < 2:
        return statuses[0] if statuses else None
    whole, *stages = statuses
    current = next((one for one in stages if one.state is not State.DONE), stages[-1])
    return whole if current.state is State.NEW else current


def is_done(
    one: LinkedStep, status: Status | None, steps: Sequence[tuple[LinkedStep, Status | None]]
) -> bool:
    """Return True if a step need not run again; `steps` are those of its chain, with their states.

    An evaluation that ended before the training did has not seen its last checkpoint.
    """
    if status is None or one.title != EVAL:
        return status is None or status.state is State.DONE
    trained = next((status for step, status in steps if step.title == "train"), None)
    complete = trained is None or (
        trained.state is State.DONE and trained.files.ended <= status.files.ended
    )
    return status.state is State.DONE and complete


def is_evaluated(job: JobDir, trained: JobDir, tasks: Sequence[str]) -> bool:
    """Return True if the evaluation in `job` has seen the last checkpoint of `trained`."""
    ending, end = job.exit_record(job.attempt()), trained.exit_record(trained.attempt())
    if ending is None or end is None or ending["code"] != ExitCode.DONE:
        return False
    return bool(ending["ended"] >= end["ended"] and load_job(job.root).eval.tasks == tuple(tasks))


def slurm_id(job: JobDir, status: Status) -> str | None:
    """Return the id of the Slurm job of a step that is queued or runs; None of any other."""
    [whole] = job_state.examine([job]) if status.job != job else [status]
    return whole.slurm.id if whole.slurm is not None and whole.slurm.live else None


def ids_to_wait_for(named: str) -> list[str]:
    """Return the Slurm ids of what `--after` names: an id, a job, stages or a chain.

    Empty if that is done. Raises ConfigError if it has ended otherwise, or is not submitted.
    """
    if re.fullmatch(r"[0-9]+(_[0-9]+)?", named):
        return _of_slurm(named)
    folder = Path(named)
    steps = read(folder)
    if not steps:
        several = job_state.stages(folder)
        steps = [LinkedStep("", JobDir(folder) if several else job_state.open_job(folder))]
    pairs = list(zip(steps, examine(steps), strict=True))
    ids: list[str] = []
    for one, status in pairs:
        if one is not steps[-1] and one.title != EVAL:
            continue  # the last step waits for its success
        if one.job is None or status is None or is_done(one, status, pairs):
            continue
        id = slurm_id(one.job, status)
        if id is None:
            raise ConfigError(
                f"--after {named}: {one.title or 'it'} is {status.state}, so its success cannot be "
                "waited for",
                why=status.detail or None,
                next=f"dtt job resume {named}, or omit --after",
            )
        check_keeps_id(one.job, named)
        ids.append(id)
    return ids


def _of_slurm(id: str) -> list[str]:
    """Return an id if its job may still succeed, nothing if it has; ConfigError if it cannot.

    Slurm itself takes a dependency on a job that it does not know for one that is fulfilled.
    """
    answer = squeue.ask([id])
    jobs = [job for key, job in answer.jobs.items() if key.partition("_")[0] == id or key == id]
    if answer.error is not None or any(job.live for job in jobs):
        return [id]
    if jobs and all(job.state == "COMPLETED" for job in jobs):
        return []
    known = f"it is {jobs[0].state}" if jobs else "Slurm does not know it"
    raise ConfigError(f"no job can wait for Slurm job {id}", why=known, next="omit --after")


def check_keeps_id(job: JobDir, named: str) -> None:
    """Raise ConfigError if a job continues under other ids, on which no job can depend."""
    if "--continuation=singleton" in (read_text(job.script) or ""):
        raise ConfigError(
            f"no job can wait for {named}",
            where=job.script,
            why="with launch.continuation=singleton, it continues as another Slurm job",
            next="launch.continuation=requeue, or submit when it is done",
        )
