"""Chains: Slurm jobs of which each starts when the one before it has ended well.

A chain has a folder, `jobs/<name>-pipeline/`, whose `chain.json` lists the job directories of its
steps in order. It stores no state: that of a step is in the step's own directory, and Slurm's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError
from dtt.base.files import write_atomically
from dtt.base.reading import read_record
from dtt.jobs import job_state
from dtt.jobs.job_state import State, Status
from dtt.jobs.slurm import squeue
from dtt.jobs.slurm.submissions import Dependency

FILE = "chain.json"


@dataclass(frozen=True)
class ChainStep:
    """A step of a chain, and its state."""

    job: JobDir
    status: Status
    """The state of its Slurm job."""
    stages: tuple[Status, ...]
    """The states of the stages that it trains, if it trains several."""

    @property
    def done(self) -> bool:
        """True if it has ended well, or all stages of its training have."""
        own = self.stages or (self.status,)
        return all(status.state is State.DONE for status in own)

    @property
    def state(self) -> State:
        """The state of its Slurm job; done where all stages are."""
        return State.DONE if self.done else self.status.state


def write(folder: Path, jobs: Sequence[JobDir]) -> None:
    """Write the list of the steps of a chain into its folder."""
    # Relative to it, so that a folder of jobs may be moved as a whole.
    names = [os.path.relpath(job.root, folder) for job in jobs]
    write_atomically(folder / FILE, json.dumps({"steps": names}, indent=1) + "\n")


def jobs_of(folder: Path) -> list[JobDir]:
    """Return the job directories of the steps of a chain; empty if the folder is none of one."""
    if not (folder / FILE).is_file():
        return []
    record = read_record(folder / FILE, {"steps": list}) or {"steps": []}
    return [JobDir(Path(os.path.normpath(folder / str(name)))) for name in record["steps"]]


def steps_of(folder: Path) -> list[ChainStep]:
    """Return the steps of a chain with their states; empty if the folder is none of one."""
    jobs = [job for job in jobs_of(folder) if job.root.is_dir()]
    stages = [job_state.stages(job.root) for job in jobs]
    # One call for all: each asks Slurm.
    found = iter(job_state.examine([*jobs, *(one for some in stages for one in some)]))
    own = [next(found) for _ in jobs]
    inner = [tuple(next(found) for _ in some) for some in stages]
    return [ChainStep(*parts) for parts in zip(jobs, own, inner, strict=True)]


def send_in_order(
    steps: Sequence[tuple[str, JobDir, Callable[[Dependency | None], str]]],
    first: Dependency | None = None,
) -> list[str]:
    """Submit steps (command, job, function that does it), each after the one before it.

    Returns Slurm's ids. The first one depends on `first`. An evaluation that watches a training
    starts with it, and nothing waits for its end. If one is rejected, those before it are
    cancelled: of a chain without its end, days of work might not come to what was asked for.
    """
    previous, ids = first, list[str]()
    try:
        for command, job, send in steps:
            watches = command == "eval"
            if previous is not None:
                previous = replace(previous, kind="after" if watches else "afterok")
            id = send(previous)
            ids.append(id)
            if not watches:
                previous = Dependency("afterok", id, str(job.root))
    except DttError:
        for id in reversed(ids):
            with suppress(DttError):
                squeue.cancel(id)
        raise
    return ids


def dependency(after: str) -> Dependency | None:
    """Return what `--after` names: a job directory, or a Slurm id; None for a job that is done.

    Raises ConfigError for a job that is not in the queue and not done.
    """
    if after.isdecimal():
        return Dependency("afterok", after, after)
    (status,) = job_state.examine([job_state.open_job(Path(after))])
    if status.state is State.DONE:
        return None
    if status.slurm is None or not status.slurm.live:
        raise ConfigError(
            f"--after {after}: it is {status.state}, and not in Slurm's queue",
            why=status.detail or None,
            next=f"dtt job resume {after}",
        )
    return Dependency("afterok", status.slurm.id, after)
