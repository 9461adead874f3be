"""Queries about Slurm jobs with squeue and, where there is accounting, sacct; and scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset(
    "COMPLETING CONFIGURING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED".split()  # noqa: SIM905
)

SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%V|%S|%e|%r")
SACCT = (
    "sacct", "--noheader", "--allocations", "--parsable2",
    "--format=JobID,State,NodeList,Submit,Start,End,Reason",
)  # fmt: skip
ROW = re.compile(r"([0-9][^|]*)\|([A-Z_]+)[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)")
"""A job in the output of both. A state may have more words: "CANCELLED by 1000"."""
TIMEOUT = 60
"""Timeout in seconds; squeue takes about 20 s to fail when the controller is down."""
PROMPT = 1.5
"""Seconds after which dtt logs that it waits for Slurm."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as recorded by Slurm."""

    id: str
    state: str
    """Slurm's job state: PENDING, RUNNING, CANCELLED, …."""
    nodes: str
    """Node list such as `n[1-2]`; empty if the job has no nodes."""
    reason: str
    """Slurm's reason why the job waits or has ended; empty if there is none."""
    since: float
    """Unix time of the event that led to the state: submission or requeue of a queued job, start of
    a running job, end of a finished one. 0 if Slurm does not report it."""

    @property
    def queued(self) -> bool:
        """True if the job waits in the queue."""
        return self.state in QUEUED

    @property
    def running(self) -> bool:
        """True if the job has nodes."""
        return self.state in RUNNING

    @property
    def suspended(self) -> bool:
        """True if the job's processes are stopped until Slurm resumes them."""
        return self.state in ("STOPPED", "SUSPENDED")

    @property
    def live(self) -> bool:
        """True if the job is queued or running."""
        return self.queued or self.running


@dataclass(frozen=True)
class QueueReply:
    """Slurm's answer to a query about jobs."""

    jobs: dict[str, SlurmJob]
    """Jobs by id, without those that Slurm does not know (any more)."""
    error: str | None = None
    """Reason why Slurm did not respond; None if it did."""


def ask(ids: Collection[str]) -> QueueReply:
    """Look up jobs by id (`17`, or `17_3` for a task of an array)."""
    if not ids:
        return QueueReply({})
    listed = f"--jobs={','.join(sorted(ids))}"
    code, out, error = _run([*SQUEUE, listed])
    # squeue fails with "Invalid job id" if asked about a single job that it has forgotten.
    if code != 0 and "Invalid job id" not in error:
        return QueueReply({}, error=error or f"squeue exited with {code}")
    try:
        # Another version, or a wrapper that the site installed, may print something else.
        jobs = _parse(out)
    except ValueError:
        return QueueReply({}, error="unexpected output of squeue")
    # Accounting knows jobs that the controller has forgotten.
    if not jobs.keys() >= set(ids):
        _, out, _ = _run([*SACCT, listed])
        with suppress(ValueError):  # unusable output of sacct: the jobs' own files must suffice
            jobs = _parse(out) | jobs
    return QueueReply(jobs)


def of_script(script: Path, since: float) -> list[str] | None:
    """Return the ids of live jobs that run `script` and were submitted after the time `since`.

    `since` is a Unix time. Returns None if Slurm does not respond. This finds submissions that
    sbatch itself could not confirm.
    """
    code, out, _ = _run(["squeue", "--noheader", "--me", "--format=%F|%V|%o"])
    rows = [line.split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
    mine = ((id, when) for id, when, path in rows if path == str(script))
    found = {id for id, when in mine if id.isdecimal() and when.isdecimal() and int(when) >= since}
    return sorted(found, key=int) if code == 0 else None


def cancel(id: str) -> None:
    """Cancel a queued or running job; EnvironmentUnfit with Slurm's message if it cannot."""
    code, _, error = _run(["scancel", id])
    if code != 0:
        raise EnvironmentUnfit(f"cannot cancel job {id}", why=error or f"scancel: {code}")


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Return a command's exit code, its output, and the last line of its error output."""
    if shutil.which(argv[0]) is None:
        return 127, "", f"{argv[0]} is not installed"
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}  # Unix time is independent of the time zone
    pipe = subprocess.PIPE
    # A hanging controller must not hang `dtt job status`.
    prompt = threading.Timer(PROMPT, log.info, ("waiting for Slurm: %s", argv[0]))
    prompt.start()
    try:
        process = subprocess.run(
            argv, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", env=env,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except OSError as failure:
        return 126, "", f"{argv[0]}: {failure.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} did not answer within {TIMEOUT} s"
    finally:
        prompt.cancel()
    lines = process.stderr.strip().splitlines()
    return process.returncode, process.stdout, lines[-1] if lines else ""


def _parse(out: str) -> dict[str, SlurmJob]:
    """Return the last row of each job.

    Other lines, such as the greeting of a wrapper, are ignored. Raises ValueError if there are only
    such lines.
    """
    jobs: dict[str, SlurmJob] = {}
    lines = out.split("\n")
    for found in filter(None, map(ROW.fullmatch, lines)):
        id, state, nodes, submit, start, end, reason = found.groups()
        when = submit if state in QUEUED else start if state in RUNNING else end
        jobs[id] = SlurmJob(
            id=id,
            state=state,
            nodes="" if nodes == "None assigned" else nodes,
            reason="" if reason == "None" else reason,
            since=float(when) if when.isdecimal() else 0.0,
        )
    if not jobs and any(line.strip() for line in lines):
        raise ValueError("no row of a job")
    return jobs


def current(ids: Iterable[str], answer: QueueReply) -> SlurmJob | None:
    """Return the current one of a job's submissions, whose ids are given oldest first.

    That is the running one, else the queued one, else the last.
    """
    # In the order of submission, so that the last one wins among equals.
    known = [answer.jobs[id] for id in ids if id in answer.jobs]
    rank = {job.id: (job.running, job.queued, i) for i, job in enumerate(known)}
    return max(known, key=lambda job: rank[job.id], default=None)
