"""Submission of trials to Slurm, as the tasks of one array or as a job each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.config.load import load_job
from dtt.config.run import RunConfig
from dtt.jobs.slurm import job_script, submissions
from dtt.jobs.slurm.job_script import Array, Script
from dtt.jobs.sweep_trials import Sweep


def submit(
    sweep: Sweep, jobs: Sequence[JobDir], cap: int | None, after: Sequence[str] = ()
) -> None:
    """Submit all jobs as one Slurm array, at most `cap` at a time.

    They start when the Slurm jobs `after` have succeeded.

    The tasks of an array share their resources, so jobs whose `launch` sections differ are
    submitted separately; raises ConfigError for these if there is a `cap`.
    """
    configs = [load_job(job.root) for job in jobs]
    launch, *others = [config.launch for config in configs]
    if any(other != launch for other in others):
        if cap is not None:
            raise ConfigError(
                f"{sweep.manifest.name} cannot limit its concurrency",
                why="the trials differ in their `launch` section, so they are separate Slurm jobs",
                next="omit `concurrency` in the sweep file",
            )
        _submit_each(jobs, after)
        return
    array = Array(tuple(job.root for job in jobs), cap)
    lead = max(job_script.lead(job, launch) for job in jobs)
    script = _script(sweep.manifest.name, sweep.root, configs[0], lead, array)
    number = submissions.submit(script, after=after)
    log.info("%s: Slurm job %s, an array of %d", sweep.root, number, len(jobs))


def _submit_each(jobs: Sequence[JobDir], after: Sequence[str]) -> None:
    """Submit every job to Slurm as a separate job."""
    for job in jobs:
        config = load_job(job.root)
        lead = job_script.lead(job, config.launch)
        number = submissions.submit(_script(config.name, job.root, config, lead), after=after)
        log.info("%s: Slurm job %s", job.root, number)


def _script(
    name: str, folder: Path, config: RunConfig, lead: int, array: Array | None = None
) -> Script:
    return Script(
        job_name=name,
        job=folder,
        directory=Path.cwd(),
        argv=("train",),
        kind="train",
        launch=config.launch,
        device=config.train.device,
        lead=lead,
        array=array,
    )
