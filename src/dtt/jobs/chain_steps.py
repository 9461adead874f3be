"""The steps of a chain of Slurm jobs, and their states.

Each step waits for the success of the one before, except the evaluation, which runs beside the
training. `chain.json` in the folder of a chain has the steps only: the state of each is that of its
job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode
from dtt.base.files import write_atomically
from dtt.base.reading import Kind, fits, read_record
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


def dependencies(
    title: str, queued: Mapping[str, str], after: Sequence[str] = ()
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the jobs that must have succeeded before a step, and those that must have started.

    `queued` are the Slurm ids of the steps that are in the queue so far, by title and in order;
    the first of them waits for the jobs `after`. The evaluation waits for the start of the training
    and for what that waits for: Slurm takes a job that it has cancelled for one that has started.
    """
    ids = {other: id for other, id in queued.items() if other != EVAL}
    if title != EVAL:
        return list(ids.values())[-1:] or after, []
    if "train" not in ids:
        return after, []
    before = list(ids.values())[: list(ids).index("train")]
    return before[-1:] or after, [ids["train"]]


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
    return [
        LinkedStep(row["step"], row["job"] and JobDir(Path(os.path.normpath(folder / row["job"]))))
        for row in rows
        if fits(row, ROW)
    ]


@dataclass(frozen=True)
class ExaminedStep:
    """A step of a chain that has a job, with its state."""

    title: str
    job: JobDir
    status: Status
    done: bool
    """True if it need not run again. An evaluation that ended before the training did has not seen
    its last checkpoint."""

    @property
    def slurm_id(self) -> str | None:
        """The id of its Slurm job if that is queued or runs."""
        whole = self.status
        if whole.job != self.job:  # the state is that of a stage
            [whole] = job_state.examine([self.job])
        return whole.slurm.id if whole.slurm is not None and whole.slurm.live else None


def examine(steps: Sequence[LinkedStep]) -> list[ExaminedStep]:
    """Return the steps with their states, without those that were done before the submission.

    A training of several stages is done when all of them are. Before that, its state is that of the
    stage that is next, which its Slurm job trains.
    """
    named = [(one.title, one.job) for one in steps if one.job is not None]
    groups = [[job, *job_state.stages(job.root)] for _, job in named]
    found = iter(job_state.examine([job for group in groups for job in group]))
    examined: list[ExaminedStep] = []
    trained: Status | None = None
    for (title, job), group in zip(named, groups, strict=True):
        status, *stages = [next(found) for _ in group]
        if stages:
            current = next((one for one in stages if one.state is not State.DONE), stages[-1])
            status = status if current.state is State.NEW else current
        done = status.state is State.DONE
        if title == EVAL and trained is not None:
            complete = trained.files.ended <= status.files.ended
            done = done and trained.state is State.DONE and complete
        trained = status if title == "train" else trained
        examined.append(ExaminedStep(title, job, status, done))
    return examined


def is_evaluated(job: JobDir, trained: JobDir, tasks: Sequence[str]) -> bool:
    """Return True if the evaluation in `job` has seen the last checkpoint of `trained`."""
    ending, end = job.exit_record(job.attempt()), trained.exit_record(trained.attempt())
    if ending is None or end is None or ending["code"] != ExitCode.DONE:
        return False
    return bool(ending["ended"] >= end["ended"] and load_job(job.root).eval.tasks == tuple(tasks))


def ids_to_wait_for(after: Sequence[str]) -> list[str]:
    """Return the Slurm ids of what `--after` names: ids, jobs, stages or chains.

    Leaves out what is done. Raises ConfigError for what has ended otherwise, or is not submitted.
    """
    ids: list[str] = []
    for named in after:
        if re.fullmatch(r"[0-9]+(_[0-9]+)?", named):
            ids += _of_slurm(named)
            continue
        folder = Path(named)
        steps = read(folder)
        if not steps:
            several = job_state.stages(folder)
            steps = [LinkedStep("", JobDir(folder) if several else job_state.open_job(folder))]
        for one in examine(steps):
            if one.done or (one.title not in (steps[-1].title, EVAL)):
                continue  # the last step waits for the success of the others
            id = one.slurm_id
            if id is None:
                raise ConfigError(
                    f"--after {named}: {one.title or 'it'} is {one.status.state}, so its success "
                    "cannot be waited for",
                    why=one.status.detail or None,
                    next=f"dtt job resume {named}, or omit --after",
                )
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
