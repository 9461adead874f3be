"""Submission of jobs to Slurm, and the record of it in each job directory."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
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


def submit(
    script: Script, *, send: bool = True, after: Sequence[str] = (), beside: Sequence[str] = ()
) -> str | None:
    """Write the job script and its supervisor, and submit it.

    Return the job id, for an array that of all tasks. It starts when the jobs with the ids `after`
    have succeeded and those with the ids `beside` have started.

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
    records = {}
    for number, path in enumerate(script.array.trials if script.array else [script.job]):
        argv = [*script.argv, *([str(path)] if script.kind == "train" else [])]
        task = number if script.array else None
        records[JobDir(path)] = _record(argv, script.directory, folder.script, task, send)
    if send:
        return _send(records, folder.script, *_dependency(after, beside))
    _write(records, None)
    return None


def submit_again(job: JobDir, after: Sequence[str] = (), beside: Sequence[str] = ()) -> str:
    """Submit a job's existing script again, from its original folder; return the job id.

    It starts when the jobs with the ids `after` have succeeded and those with the ids `beside` have
    started.
    """
    # The directory of the first submission: sbatch would use the current one.
    options = [f"--chdir={directory(job)}"] if job.submission_record() else []
    record = _record(job_argv(job), directory(job), job.script, None, True)
    return _send({job: record}, job.script, *options, *_dependency(after, beside))


def _dependency(after: Sequence[str], beside: Sequence[str]) -> list[str]:
    """Return the options of sbatch with which a job waits for others to succeed, or to start.

    A requeued job keeps its id, so it counts when it ends for good. If it fails, Slurm cancels the
    job that waits, which would stay in the queue for ever.
    """
    kinds = {"afterok": after, "after": beside}
    waits = ",".join(":".join([kind, *ids]) for kind, ids in kinds.items() if ids)
    return [f"--dependency={waits}", "--kill-on-invalid-dep=yes"] if waits else []


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
    argv: Sequence[str], directory: Path, script: Path, task: int | None, send: bool
) -> dict[str, object]:
    """Return the record of a submission now, without its id.

    `task` is the index of a task of an array, else None. `send` is False if sbatch is not asked.
    """
    return {
        # Before sbatch answers, the job may have started: the submission is older than that.
        "time": time.time(),
        "command": redacted(shlex.join(["dtt", *sys.argv[1:]])),
        "argv": list(argv),
        "directory": str(directory),
        # `find_unanswered` finds a job without an id by its script.
        "script": str(script.absolute()),
        "script_sha256": sha256_file(script),
        "task": task,
        "sent": send,
    }


def _write(records: Mapping[JobDir, Mapping[str, object]], id: str | None) -> None:
    """Write the records of a submission with Slurm's id; None if sbatch gave none."""
    for job, record in records.items():
        own = id if id is None or record["task"] is None else f"{id}_{record['task']}"
        write_atomically(job.submission, json.dumps({"job_id": own, **record}, indent=1) + "\n")


def _send(records: Mapping[JobDir, Mapping[str, object]], script: Path, *options: str) -> str:
    """Submit a script and write the record of each job; return Slurm's id."""
    # Requests that no process received: a job that starts at once must not find them.
    paths = [path for job in records for path in (job.stop, job.save) if path.exists()]
    removed = {path: tolerant(path, read_small) or b"" for path in paths}
    for path in removed:
        remove(path)
    try:
        id = job_script.submit(script, *options)
    except job_script.SlurmUnreachable:
        # Slurm may have accepted the job, which must not receive old requests.
        _write(records, None)
        raise
    except DttError:
        for path, text in removed.items():
            write_atomically(path, text)
        raise
    _write(records, id)
    return id
