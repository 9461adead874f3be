"""Submission of jobs to Slurm, and the record of it in each job directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, EnvironmentUnfit
from dtt.base.files import remove, write_atomically
from dtt.base.log import log
from dtt.base.reading import Kind, fits, read_small, tolerant
from dtt.base.secrets import redacted
from dtt.jobs.job_files import job_argv
from dtt.jobs.slurm import job_script, squeue
from dtt.jobs.slurm.job_script import Script

UNANSWERED: Mapping[str, Kind] = {"time": float, "script": str, "task": (int, type(None))}
"""Fields of the record of a submission that sbatch did not answer."""
NO_ANSWER = re.compile(r"timed out|Zero Bytes|Transport endpoint|Unexpected message", re.IGNORECASE)
"""Messages of sbatch after which it is unknown whether the controller processed the request."""
LONGEST_WAIT = 600
"""Maximum time in seconds that sbatch may have waited for an answer."""
CLOCKS_DIFFER = 60
"""Maximum difference in seconds between the clock of Slurm's controller and the local one."""


class SlurmUnreachable(EnvironmentUnfit):
    """Raised for a submission when it is unknown whether Slurm accepted it."""


def submit(script: Script, *, after: Sequence[str] = (), beside: Sequence[str] = ()) -> str:
    """Write the job script and its supervisor, and submit it.

    Return the job id, for an array that of all tasks. It starts when the jobs with the ids `after`
    have succeeded and those with the ids `beside` have started.
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
        records[JobDir(path)] = _record(argv, script.directory, folder.script, task)
    return _send(records, folder.script, after, beside)


def submit_again(job: JobDir, after: Sequence[str] = (), beside: Sequence[str] = ()) -> str:
    """Submit a job's existing script again, from its original folder; return the job id.

    It starts when the jobs with the ids `after` have succeeded and those with the ids `beside` have
    started.
    """
    # The directory of the first submission: sbatch would use the current one.
    options = [f"--chdir={directory(job)}"] if job.submission_record() else []
    record = _record(job_argv(job), directory(job), job.script, None)
    return _send({job: record}, job.script, after, beside, *options)


def directory(job: JobDir) -> Path:
    """Return the folder to which the arguments of a job are relative."""
    submission = job.submission_record()
    return Path(submission["directory"]) if submission else Path.cwd()


def find_unanswered(job: JobDir) -> list[str]:
    """Return Slurm's ids of the newest submission if sbatch returned none and Slurm has accepted
    it."""
    newest = job.submission_record() or {}
    if newest.get("job_id") is not None or not fits(newest, UNANSWERED):
        return []
    # sbatch retries on its own for minutes, so the submission may be older than the record.
    earliest = newest["time"] - LONGEST_WAIT
    found = squeue.of_script(Path(newest["script"]), earliest)
    task = "" if newest["task"] is None else f"_{newest['task']}"
    return [f"{id}{task}" for id in found or []]


def _record(
    argv: Sequence[str], directory: Path, script: Path, task: int | None
) -> dict[str, object]:
    """Return the record of a submission now, without its id.

    `task` is the index of a task of an array, else None.
    """
    return {
        # Before sbatch answers, the job may have started: the submission is older than that.
        "time": time.time(),
        "command": redacted(shlex.join(["dtt", *sys.argv[1:]])),
        "argv": list(argv),
        "directory": str(directory),
        # `find_unanswered` finds a job without an id by its script.
        "script": str(script.absolute()),
        "task": task,
    }


def _write(records: Mapping[JobDir, Mapping[str, object]], id: str | None) -> None:
    """Write the records of a submission with Slurm's id; None if sbatch gave none."""
    for job, record in records.items():
        own = id if id is None or record["task"] is None else f"{id}_{record['task']}"
        write_atomically(job.submission, json.dumps({"job_id": own, **record}, indent=1) + "\n")


def _send(
    records: Mapping[JobDir, Mapping[str, object]],
    script: Path,
    after: Sequence[str],
    beside: Sequence[str],
    *options: str,
) -> str:
    """Submit a script and write the record of each job; return Slurm's id."""
    # A requeued job keeps its id, so it counts when it ends for good. If it fails, Slurm cancels
    # the job that waits, which would stay in the queue for ever.
    kinds = {"afterok": after, "after": beside}
    if waits := ",".join(":".join([kind, *ids]) for kind, ids in kinds.items() if ids):
        options = (*options, f"--dependency={waits}", "--kill-on-invalid-dep=yes")
    # Requests that no process received: a job that starts at once must not find them.
    paths = [path for job in records for path in (job.stop, job.save) if path.exists()]
    removed = {path: tolerant(path, read_small) or b"" for path in paths}
    for path in removed:
        remove(path)
    try:
        id = sbatch(script, *options)
    except SlurmUnreachable:
        # Slurm may have accepted the job, which must not receive old requests.
        _write(records, None)
        raise
    except DttError:
        for path, text in removed.items():
            write_atomically(path, text)
        raise
    _write(records, id)
    return id


def sbatch(script: Path, *options: str) -> str:
    """Submit a job script from the current folder; return the job id.

    Raises EnvironmentUnfit with the message of sbatch if Slurm refuses the job, and
    SlurmUnreachable if it is unknown whether Slurm accepted it.
    """
    argv = ["sbatch", "--parsable", *options, str(script)]
    earliest = time.time() - CLOCKS_DIFFER
    log.info("submitting %s", script)  # a busy controller takes up to a minute to answer
    done = subprocess.run(argv, env=_outside(), capture_output=True, text=True, check=False)
    message = done.stderr.strip()
    if done.returncode != 0 and not NO_ANSWER.search(message):
        raise EnvironmentUnfit(
            "Slurm rejected the job",
            where=script,
            why=message or f"sbatch exited with {done.returncode}",
            next="fix the `launch` section, then submit again",
        )
    if done.returncode == 0:
        # `--parsable` prints `id`, or `id;cluster`, after what a wrapper of the site may print.
        printed = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        answer = re.fullmatch(r"([0-9]+)(;.*)?", printed[-1]) if printed else None
        if answer is not None:
            return answer[1]
        message = "sbatch was silent"
        if printed:
            message = f"sbatch printed no job id, but {printed[-1]!r}"
    # The request may have been processed: submitting again could start the job twice. Ten seconds
    # in all, as a controller under load answers late.
    for seconds in (1, 3, 6):
        time.sleep(seconds)
        if found := squeue.of_script(script.absolute(), earliest):
            return found[-1]
    raise SlurmUnreachable(
        "it is unknown whether Slurm accepted the job",
        where=script.absolute(),
        why=message,
        next=f"run dtt job status {script.absolute().parent} when Slurm answers again; nothing was "
        "removed",
    )


def _outside() -> dict[str, str]:
    """Return the environment without the variables of an allocation in which dtt itself runs.

    `srun` in the job would take them for options, such as `SLURM_NTASKS`. `SLURM_CONF` names the
    cluster.
    """
    theirs, kept = ("SLURM_", "SLURMD_", "PMI_", "PMI2_", "PMIX_"), ("SLURM_CONF", "SLURM_CLUSTERS")
    return {k: v for k, v in os.environ.items() if k in kept or not k.startswith(theirs)}
