"""Submission of jobs to Slurm, and the record of it in each job directory."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.base.files import remove, sha256_file, write_atomically
from dtt.base.reading import Kind, fits, read_small, tolerant
from dtt.base.secrets import redacted
from dtt.jobs.job_files import job_argv
from dtt.jobs.slurm import job_script, squeue
from dtt.jobs.slurm.job_script import Script

UNANSWERED: Mapping[str, Kind] = {"time": float, "script": str, "task": (int, type(None))}
"""Fields of the record of a submission that sbatch did not answer."""


def submit(script: Script, *, send: bool = True) -> str | None:
    """Write the job script and its supervisor, and submit it.

    Return the job id, for an array that of all tasks.

    Without `send`, only write it and return None. Slurm is then asked for jobs of this script, and
    finds one as soon as a user submits it.
    """
    folder = JobDir(script.job)
    folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create the folder of --output
    folder.supervisor.mkdir(exist_ok=True)
    # A copy: an update of dtt must not change the supervisor of a job that waits in the queue.
    for path in job_script.SUPERVISOR.glob("*.py"):
        write_atomically(folder.supervisor / path.name, path.read_text(encoding="utf-8"))
    write_atomically(folder.script, job_script.render(script))
    folder.script.chmod(0o755)
    jobs = [JobDir(path) for path in script.array.trials] if script.array else [folder]
    # Before sbatch answers, the job may have started: the submission is older than that.
    submitted = time.time()

    def record(id: str | None) -> None:
        for number, job in enumerate(jobs):
            argv = [*script.argv, *([str(job.root)] if script.kind == "train" else [])]
            task = number if script.array else None
            _record(job, id, argv, script.directory, task, folder.script, submitted, sent=send)

    if not send:
        record(None)
        return None
    # Before submission: a job that starts at once must not find the requests of an earlier one.
    with _requests_removed(jobs), _unanswered_recorded(record):
        id = job_script.submit(folder.script)
    record(id)
    return id


def submit_again(job: JobDir) -> str:
    """Submit a job's existing script again, from its original folder; return the job id."""
    # The directory of the first submission: sbatch would use the current one.
    folder = directory(job) if job.submission_record() else None
    submitted = time.time()

    def record(id: str | None) -> None:
        _record(job, id, job_argv(job), directory(job), None, job.script, submitted)

    with _requests_removed([job]), _unanswered_recorded(record):
        id = job_script.submit(job.script, *([f"--chdir={folder}"] if folder else []))
    record(id)
    return id


def find_unanswered(job: JobDir) -> list[str]:
    """Return Slurm's ids of the newest submission if sbatch returned none and Slurm has accepted
    it."""
    newest = job.submission_record() or {}
    if newest.get("job_id") is not None or not fits(newest, UNANSWERED):
        return []
    # sbatch retries on its own for minutes, so the submission may be older than the record.
    earliest = newest["time"] - job_script.LONGEST_WAIT
    found = squeue.of_script(Path(newest["script"]), earliest)
    task = "" if newest["task"] is None else f"_{newest['task']}"
    return [f"{id}{task}" for id in found or []]


def directory(job: JobDir) -> Path:
    """Return the folder to which the arguments of a job are relative."""
    submission = job.submission_record()
    return Path(submission["directory"]) if submission else Path.cwd()


def _record(
    job: JobDir,
    id: str | None,
    argv: Sequence[str],
    directory: Path,
    task: int | None,
    script: Path,
    submitted: float,
    *,
    sent: bool = True,
) -> None:
    """Write the record of a submission.

    `id` is None if sbatch did not answer, or was not asked: if not `sent`. `task` is the index of a
    task of an array, else None.
    """
    record = {
        "time": submitted,
        "job_id": id if id is None or task is None else f"{id}_{task}",
        "command": redacted(shlex.join(["dtt", *sys.argv[1:]])),
        "argv": list(argv),
        "directory": str(directory),
        # `find_unanswered` finds a job without an id by its script.
        "script": str(script.absolute()),
        "script_sha256": sha256_file(script),
        "task": task,
        "sent": sent,
    }
    write_atomically(job.submission, json.dumps(record, indent=1) + "\n")


@contextmanager
def _unanswered_recorded(record: Callable[[str | None], None]) -> Iterator[None]:
    """Record a submission that Slurm may have accepted although sbatch received no answer."""
    try:
        yield
    except job_script.Unanswered:
        record(None)
        raise


@contextmanager
def _requests_removed(jobs: Sequence[JobDir]) -> Iterator[None]:
    """Remove requests that no process received; restore them if Slurm refuses the jobs."""
    paths = [path for job in jobs for path in (job.stop, job.save) if path.exists()]
    removed = {path: tolerant(path, read_small) or b"" for path in paths}
    for path in removed:
        remove(path)
    try:
        yield
    except job_script.Unanswered:
        # Slurm may have accepted the job, which must not receive old requests.
        raise
    except DttError:
        for path, text in removed.items():
            write_atomically(path, text)
        raise
