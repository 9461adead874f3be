"""What Slurm says of jobs: squeue, and sacct where there is accounting; and scancel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dtt.errors import EnvironmentUnfit

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset(
    "COMPLETING CONFIGURING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED".split()  # noqa: SIM905
)

SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%V|%S|%e|%r")
SACCT = (
    "sacct", "--noheader", "--allocations", "--duplicates", "--parsable2",
    "--format=JobID,State,NodeList,Submit,Start,End,Reason",
)  # fmt: skip
PATIENCE = 60
"""Seconds; a controller that is down takes squeue about 20."""


SUSPENDED = frozenset({"STOPPED", "SUSPENDED"})
"""It has nodes, and its processes do not run."""


@dataclass(frozen=True)
class SlurmJob:
    """One job, as Slurm has it."""

    id: str
    state: str
    """In Slurm's words: PENDING, RUNNING, CANCELLED, …"""
    nodes: str
    """As `n[1-2]`; empty without any."""
    reason: str
    """Why it waits or has ended, in Slurm's words; empty if it says none."""
    since: float
    """When it was submitted or requeued, has started or has ended (unix): whichever its state is
    about. 0 if Slurm does not say."""
    before: str = ""
    """How its run before this one ended, if Slurm itself started it again; needs accounting."""

    @property
    def queued(self) -> bool:
        """Whether it waits for its turn."""
        return self.state in QUEUED

    @property
    def running(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING

    @property
    def suspended(self) -> bool:
        """True if its processes are stopped until Slurm resumes them."""
        return self.state in SUSPENDED

    @property
    def withdrawn(self) -> bool:
        """True if it was cancelled before it had nodes."""
        return self.state == "CANCELLED" and not self.nodes

    @property
    def live(self) -> bool:
        """Whether something may still come of it."""
        return self.queued or self.running


@dataclass(frozen=True)
class Answer:
    """What Slurm said about the jobs it was asked for."""

    jobs: dict[str, SlurmJob]
    """By id; those that it does not know (any more) are not here."""
    silence: str | None = None
    """Why there was no answer, if there was none."""


def ask(ids: Collection[str]) -> Answer:
    """Look up jobs by id (`17`, or `17_3` for a task of an array)."""
    if not ids:
        return Answer({})
    listed = f"--jobs={','.join(sorted(ids))}"
    code, out, error = _run([*SQUEUE, listed])
    if code != 0 and "Invalid job id" not in error:  # said of a single job that it has forgotten
        return Answer({}, silence=error or f"squeue ended with {code}")
    try:
        jobs = _parse(out)
    except ValueError:
        return Answer({}, silence="squeue printed something else than jobs")
    # Accounting knows what the controller has forgotten, and how a requeued job ended before.
    if any(id not in jobs or jobs[id].queued for id in ids):
        _, out, _ = _run([*SACCT, listed])
        try:
            past = _parse(out)
        except ValueError:  # a job that is not found there is told from its files
            past = {}
        for id, job in past.items():
            jobs[id] = replace(jobs[id], before=_ended_before(job)) if id in jobs else job
    return Answer(jobs)


def of_script(script: Path, since: float) -> list[str] | None:
    """Return the ids of the live jobs that run `script` and were submitted after `since` (unix).

    None if Slurm gives no answer. For a submission that sbatch itself could not confirm.
    """
    code, out, _ = _run(["squeue", "--noheader", "--me", "--format=%F|%V|%o"])
    rows = [line.split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
    found = {id for id, when, path in rows if path == str(script) and float(when) >= since}
    return sorted(found, key=int) if code == 0 else None


def cancel(id: str) -> None:
    """Take a job out of the queue, or end it; EnvironmentUnfit, in Slurm's words, if it cannot."""
    code, _, error = _run(["scancel", id])
    if code != 0:
        raise EnvironmentUnfit(f"cannot cancel job {id}", why=error or f"scancel: {code}")


def _ended_before(last: SlurmJob) -> str:
    """How the previous run ended, told by the last row that accounting has of a queued job."""
    return last.before if last.live else last.state


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, output, and what went wrong in a line."""
    if shutil.which(argv[0]) is None:
        return 127, "", f"there is no {argv[0]} here"
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}  # unix time: no time zone to guess
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, env=env, check=False, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} did not answer within {PATIENCE} s"
    lines = done.stderr.strip().splitlines()
    return done.returncode, done.stdout, lines[-1] if lines else ""


def _parse(out: str) -> dict[str, SlurmJob]:
    """The last row of each job; `before` is the state of the row before it."""
    jobs: dict[str, SlurmJob] = {}
    for line in out.splitlines():
        id, state, nodes, submit, start, end, reason = line.split("|", 6)
        state = state.split()[0]  # "CANCELLED by 1000"
        when = submit if state in QUEUED else start if state in RUNNING else end
        jobs[id] = SlurmJob(
            id=id,
            state=state,
            nodes="" if nodes == "None assigned" else nodes,
            reason="" if reason == "None" else reason,
            since=float(when) if when.isdigit() else 0.0,
            before=jobs[id].state if id in jobs else "",
        )
    return jobs


def current(ids: Iterable[str], answer: Answer) -> SlurmJob | None:
    """Of a job's submissions, oldest first, the one that counts: running, else queued, else last.

    A successor waits in the queue while its predecessor runs.
    """
    known = [answer.jobs[id] for id in ids if id in answer.jobs]
    rank = {job.id: (job.running, job.queued, i) for i, job in enumerate(known)}
    return max(known, key=lambda job: rank[job.id], default=None)
