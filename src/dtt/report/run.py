"""`dtt report`: write the page of one or several jobs, or serve live pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.files import write_atomically
from dtt.base.local_server import LocalServer
from dtt.base.log import log
from dtt.jobs import job_state
from dtt.jobs.sweeps import Sweep, SweepManifest

MAX_AT_END = 2**30
"""Bytes of metrics.jsonl up to which a run writes its report when it ends: about 40 s."""


def write(paths: Sequence[Path], out: Path | None) -> None:
    """Write the report of jobs, of the trials of a sweep, or of the stages of a configuration.

    The page is `report.html` in their folder, or in the working directory for several; `out`
    replaces this. Prints its path. Raises InputError if there is no such job.
    """
    from dtt.report.page import render
    from dtt.report.report_pages import report_data  # slow to import: numpy, pyarrow

    if not paths:
        raise ConfigError("no job is named", next="dtt report jobs/quickstart, or add --serve")
    sweep = _sweep(paths[0]) if len(paths) == 1 else None
    target = out or JobDir(paths[0] if len(paths) == 1 else Path()).report
    statuses = job_state.examine(find_jobs(paths))
    write_atomically(target, render(report_data(statuses, sweep=sweep)))
    print(target)


def write_at_end(jobs: Sequence[JobDir], folder: Path, sweep: Sweep | None = None) -> Path | None:
    """Write the report of jobs that have just ended to `folder`; return its path.

    `sweep` is the sweep whose trials they are, if there is one. Returns None after an error, which
    is only logged, because everything that matters is saved by now; and for very long runs, whose
    page takes a while to write.
    """
    target = JobDir(folder).report
    try:
        size = sum(job.metrics.stat().st_size for job in jobs if job.metrics.is_file())
        if size > MAX_AT_END:  # nodes would wait for the page
            log.info("dtt report %s writes the report, which takes a while", folder)
            return None
        from dtt.report.page import render
        from dtt.report.report_pages import report_data

        data = report_data(job_state.examine(jobs), sweep=sweep)
        write_atomically(target, render(data))
    except Exception as error:  # noqa: BLE001  a page must not turn a finished run into a failed one
        log.warning("the report could not be written: %s; try dtt report %s", error, folder)
        return None
    return target


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve live pages of jobs, by default of all jobs in `jobs/`, until the user interrupts it."""
    from dtt.report.report_pages import Pages, jobs_data, report_data

    def find() -> list[JobDir]:
        return find_jobs(paths) if paths else job_state.find(Path("jobs"))

    find()  # an error before the server starts
    LocalServer(Pages(find, jobs_data, partial(report_data, live=True)), port).serve()


def find_jobs(paths: Sequence[Path]) -> list[JobDir]:
    """Return the jobs in these folders: a job, the stages of a configuration, or the trials of a
    sweep."""
    jobs: dict[Path, JobDir] = {}
    for path in paths:
        sweep = _sweep(path)
        found = [] if sweep is None else [sweep.job(trial) for trial in sweep.manifest.trials]
        for job in found or job_state.stages(path) or [job_state.open_job(path)]:
            jobs[job.root] = job
    return list(jobs.values())


def _sweep(path: Path) -> Sweep | None:
    return Sweep(path, SweepManifest.read(path)) if SweepManifest.exists(path) else None
