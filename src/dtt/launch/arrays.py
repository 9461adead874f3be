"""Trials as the tasks of one Slurm array, or as a Slurm job each."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from dtt.config.load import load_job
from dtt.errors import ConfigError
from dtt.launch import slurm
from dtt.launch.slurm import Array, Script
from dtt.launch.sweep import Sweep
from dtt.runtime.files import write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log


def submit(sweep: Sweep, jobs: Sequence[JobDir], cap: int | None) -> None:
    """Hand all jobs to Slurm as one array, `cap` at a time; ConfigError if they differ in kind."""
    launch, *others = [load_job(job.root).launch for job in jobs]
    if any(other != launch for other in others):
        raise ConfigError(
            "the tasks of an array ask Slurm for the same",
            why="these trials differ under `launch`",
            next="--separate submits each by itself",
        )
    script = Script(
        job_name=sweep.manifest.name,
        job=sweep.root,
        directory=Path.cwd(),
        argv=("train",),
        kind="train",
        launch=launch,
        lead=max(slurm.lead(job, launch) for job in jobs),
        array=Array(tuple(job.root for job in jobs), cap),
    )
    number = _submit(JobDir(sweep.root), script)
    for task, job in enumerate(jobs):
        _note(job, f"{number}_{task}")
    log.info("%s: Slurm job %s, an array of %d", sweep.root, number, len(jobs))


def submit_each(jobs: Sequence[JobDir]) -> None:
    """Hand every job to Slurm by itself."""
    for job in jobs:
        config = load_job(job.root)
        script = Script(
            job_name=config.name,
            job=job.root,
            directory=Path.cwd(),
            argv=("train",),
            kind="train",
            launch=config.launch,
            lead=slurm.lead(job, config.launch),
        )
        number = _submit(job, script)
        _note(job, number)
        log.info("%s: Slurm job %s", job.root, number)


def _submit(folder: JobDir, script: Script) -> str:
    """Write the script and submit it; returns Slurm's job id."""
    folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm makes none
    write_atomically(folder.script, slurm.render(script))
    return slurm.submit(folder.script)


def _note(job: JobDir, number: str) -> None:
    record = {"time": time.time(), "job_id": number, "command": "dtt sweep"}
    with job.submissions.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def dequeue(number: str) -> None:
    """Take a job out of Slurm's queue; one that has begun meanwhile saves and stops."""
    # Not with --state=PENDING: Slurm would then cancel every waiting task of the array.
    subprocess.run(["scancel", number], capture_output=True, check=False)
