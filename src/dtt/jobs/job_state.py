"""The state of jobs, derived from their own files and, where these are inconclusive, from Slurm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode, InputError
from dtt.jobs.job_files import (
    SILENT_SECONDS,
    JobFiles,
    job_argv,
    last_lines,
    newest_log,
    trigger_lines,
)
from dtt.jobs.slurm import squeue, submissions
from dtt.jobs.slurm.squeue import QueueReply, SlurmJob

FINAL = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.DAMAGED,
    ExitCode.INPUT_MISSING,
    ExitCode.DIVERGED,
    ExitCode.INTERRUPTED,
)
"""Exit codes after which the job script does not retry."""
LOG_LINES = 5
GAVE_UP = re.compile(r"over: .*?\b([0-9]{1,9}) consecutive attempts\b")
"""The decision of a supervisor that has used all attempts allowed without a new checkpoint."""


Verdict = tuple["State", str]
"""A state of a job, and the most relevant detail in one line, which may be empty."""


class State(StrEnum):
    """The state of a job: its current activity, or how it ended."""

    NEW = "never started"
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"
    OUT_OF_ATTEMPTS = "out of attempts"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    PREEMPTED = "preempted"
    NODE_FAILED = "node failed"
    LOST = "lost"
    """It should run, or has run, and nothing says how it ended: Slurm runs it without a fresh
    heartbeat, its newest attempt ended without a record, or Slurm forgot it before its start."""
    UNKNOWN = "unknown"


FAILURES = (State.FAILED, State.OUT_OF_ATTEMPTS, State.NODE_FAILED, State.LOST)
ENDED_BY_SLURM = {
    "BOOT_FAIL": State.NODE_FAILED,
    "CANCELLED": State.CANCELLED,
    "DEADLINE": State.TIMED_OUT,
    "NODE_FAIL": State.NODE_FAILED,
    "PREEMPTED": State.PREEMPTED,
    "TIMEOUT": State.TIMED_OUT,
}


@dataclass(frozen=True)
class Status:
    """The state of a job and the facts it was derived from."""

    state: State
    detail: str
    """The most relevant detail, in one line; may be empty."""
    files: JobFiles
    slurm: SlurmJob | None
    """Slurm's record of the job; None if it was never submitted or Slurm does not know it."""
    slurm_error: str | None
    """Reason why Slurm did not respond; None if it did, or was not asked."""

    @property
    def job(self) -> JobDir:
        """The directory of the job."""
        return self.files.job

    @property
    def alive(self) -> bool:
        """True if there are, or soon will be, processes that can receive a request."""
        return self.state in (State.RUNNING, State.STOPPING, State.SUSPENDED)

    @property
    def queued(self) -> bool:
        """True if the job waits in Slurm's queue, for the first time or again."""
        return not self.alive and self.slurm is not None and self.slurm.queued

    def check_idle(self) -> None:
        """Raise ConfigError if the job runs or is queued, so that it must not be started again."""
        if not self.alive and not (self.slurm is not None and self.slurm.live):
            return
        known = f" as Slurm job {self.slurm.id}" if self.slurm is not None else ""
        yes = " -y" if self.queued else ""
        raise ConfigError(
            f"{self.job.root} is {self.state}{known}",
            why=self.detail or None,
            next=f"wait until it ends, or run dtt job stop {self.job.root}{yes}",
        )

    @property
    def changed(self) -> float:
        """The Unix time at which it was last submitted, started, sent a heartbeat or ended."""
        files = self.files
        beat = files.heartbeat["time"] if files.heartbeat else 0.0
        return max(files.submitted, files.started, files.ended, beat)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the last step, at the current speed; None if unknown."""
        beat, step = self.files.heartbeat, self.files.step
        if not self.files.alive or not beat or step is None or beat["seconds_per_step"] is None:
            return None
        return float((beat["steps"] - step) * beat["seconds_per_step"])

    @property
    def log_tail(self) -> list[str]:
        """The last lines of the log of a failed job; empty for any other job."""
        if self.state not in FAILURES:
            return []
        # Before an attempt, only the job script has a log.
        log = newest_log(self.job, None if self.files.attempt else "slurm")
        return last_lines(log, LOG_LINES) if log else []


def examine(jobs: Sequence[JobDir]) -> list[Status]:
    """Return the state of each job; a single call asks Slurm about all of them."""
    files = [JobFiles.read(job) for job in jobs]
    ids = [one.slurm_ids + submissions.find_unanswered(one.job) for one in files]
    # One call for all jobs: each is a process, and a request to Slurm's controller.
    known = {id for some in ids for id in some}
    answer = squeue.ask(known)
    if known:  # again, as Slurm may take long to answer, and the files change meanwhile
        files = [JobFiles.read(job) for job in jobs]
    return [_status(one, some, answer) for one, some in zip(files, ids, strict=True)]


def find(folder: Path) -> list[JobDir]:
    """Return the jobs in a folder, and one level below it, where the trials of sweeps are."""
    if not folder.is_dir():
        raise InputError(
            f"no folder {folder}", next="run dtt in the folder of jobs/, or give the folder"
        )
    patterns = "[!.]*", "[!.]*/[!.]*"
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    return [JobDir(path) for path in sorted(paths) if _is_job(path)]


def stages(folder: Path) -> list[JobDir]:
    """Return the jobs of the stages in `jobs/<name>/`, in order, including unstarted ones.

    Empty if the folder contains no stages.
    """
    if JobDir(folder).exists:
        return []
    records = (JobDir(path.parent).stage_record() for path in sorted(folder.glob("*/stage.json")))
    names: list[str] = next((record["stages"] for record in records if record), [])
    return [JobDir(folder / name) for name in names]


def open_job(path: Path) -> JobDir:
    """Return the job in a folder; InputError if there is none."""
    if _is_job(path):
        return JobDir(path)
    named = Path("jobs") / path
    next = f"use its directory: {named}" if _is_job(named) else "list jobs with dtt job ls"
    raise InputError(f"{path} is not a job directory", next=next)


def _is_job(path: Path) -> bool:
    job = JobDir(path)
    return job.config.is_file() or job.attempt() > 0


def _status(files: JobFiles, ids: Sequence[str], answer: QueueReply) -> Status:
    if not ids:  # Slurm was asked about other jobs only, so a failure to answer is irrelevant here
        answer = QueueReply({})
    slurm = squeue.current(ids, answer)
    state, detail = _verdict(files, ids, slurm, answer)
    return Status(state, detail, files, slurm, answer.error)


def _verdict(
    files: JobFiles, ids: Sequence[str], slurm: SlurmJob | None, answer: QueueReply
) -> Verdict:
    """Return the state and its detail; the first case that applies decides."""
    code = files.ending["code"] if files.ending is not None else None
    # Before the heartbeat, which is old: stopped processes write none.
    if slurm is not None and slurm.suspended:
        return State.SUSPENDED, f"on {slurm.nodes}, until Slurm resumes it"
    # Files first: they are newer than Slurm's view, and present without Slurm. But if Slurm no
    # longer runs the job, this is the last heartbeat before its processes died.
    own = answer.jobs.get(files.record.get("slurm") or "")
    if files.alive and (own is None or own.running):
        return _running(files)
    # Slurm says it is alive, and the files do not say that it is over.
    if slurm is not None and slurm.live and _may_continue(files, slurm):
        return _queued(files, slurm) if slurm.queued else _without_heartbeat(files, slurm)
    # A final exit code outranks how Slurm ended the batch script afterwards. An older job's end
    # says nothing about an attempt that started later; only training records its start.
    if slurm is not None and slurm.state in ENDED_BY_SLURM and code not in FINAL:
        current = files.record.get("slurm") == slurm.id or slurm.since >= files.started
        if current or job_argv(files.job)[0] != "train":
            return ENDED_BY_SLURM[slurm.state], _saved_work(files, slurm)
    # No answer is not `gone`: a job that may still be queued must not be started twice, unless its
    # own files prove that it has ended.
    settled = files.decided_to_end or (code in FINAL and files.ended > files.submitted)
    if files.unanswered and not settled:
        error = answer.error or "squeue does not list it yet"
        return State.UNKNOWN, f"sbatch did not report whether Slurm accepted it; {error}"
    if answer.error and not settled:
        how = f"; attempt {files.attempt} ended: {files.reason}" if code is not None else ""
        return State.UNKNOWN, f"submitted as {ids[-1]}; {answer.error}{how}"
    return _ended(files, files.ending) if files.ending else _ended_unrecorded(files, ids, slurm)


def _may_continue(files: JobFiles, slurm: SlurmJob) -> bool:
    """Return True unless the newest attempt had a final ending after `slurm` last changed.

    The job script still runs when it has decided that the job does not continue, and writes the
    report. Slurm may then requeue the job all the same, such as after a failed node.
    """
    if files.decided_to_end and not slurm.queued:
        return False
    if files.ending is None or files.ending["code"] not in FINAL:
        return True
    # The Slurm job of several stages lives on after one is done, for the next.
    done = files.ending["code"] == ExitCode.DONE and files.is_stage
    return not done and slurm.since > files.ended


def _running(files: JobFiles) -> Verdict:
    """Return the state of a job with a fresh heartbeat."""
    answer = files.acknowledged
    if answer is not None and answer["request"] == "stop":
        at = f"acknowledged at step {answer['step']}"
        return State.STOPPING, f"requested by {answer['by']}, {at}"
    if files.job.stop.exists():
        by = trigger_lines(files.job.stop)[0]
        return State.STOPPING, f"requested by {by}, not yet acknowledged"
    if files.job.save.exists():
        by = trigger_lines(files.job.save)[0]
        return State.RUNNING, f"save requested by {by}, not yet acknowledged"
    phase = files.heartbeat["phase"] if files.heartbeat else "start"
    return State.RUNNING, "" if phase == "step" else f"in phase {phase}"


def _queued(files: JobFiles, slurm: SlurmJob) -> Verdict:
    """Return the state of a job in Slurm's queue."""
    why = f"waiting in the queue ({slurm.reason or 'no reason given'})"
    if not files.attempt:
        return State.QUEUED, why
    # Only a requeue continues a run, not a job that a user submitted again. Slurm records a
    # preemption as a requeue or a failure; the job script knows better.
    if slurm.id == files.record.get("slurm") and files.decision.startswith("again: preempted"):
        return State.PREEMPTED, f"{why}; {files.reason}"
    return State.QUEUED, f"{why}; attempt {files.attempt}: {files.reason}"


def _without_heartbeat(files: JobFiles, slurm: SlurmJob) -> Verdict:
    """Return the state of a job that Slurm runs without a fresh heartbeat.

    It is starting, ending, or its processes are lost. Without any heartbeat it counts as running,
    as not every command writes them; outside of Slurm such an attempt is lost after a minute.
    """
    where = f"Slurm job on {slurm.nodes or 'its nodes'}"
    if slurm.since > files.started:  # the newest attempt belongs to an earlier run
        return State.RUNNING, f"starting: {where}"
    if files.ending is not None and files.ending["code"] == ExitCode.PREEMPTED:
        return State.STOPPING, files.reason
    if files.ending is not None:
        return State.RUNNING, f"attempt {files.attempt} ended: {files.reason}"
    if files.heartbeat is None:
        return State.RUNNING, where
    if files.heartbeat_age <= SILENT_SECONDS:
        return State.RUNNING, f"starting: {where}"
    return State.LOST, f"{where}, no heartbeat for {files.heartbeat_age:.0f} s"


def _saved_work(files: JobFiles, slurm: SlurmJob) -> str:
    """Return what an attempt that Slurm ended has saved."""
    if slurm.reason == "DependencyNeverSatisfied":
        return "the job that it waited for did not succeed"
    if not files.attempt:
        return "before it started"
    if files.ending is not None and files.ending["code"] == ExitCode.PREEMPTED:
        return files.reason
    checkpoint = files.job.newest_checkpoint_name()
    return f"{checkpoint} is the newest checkpoint" if checkpoint else "nothing was saved"


def _ended(files: JobFiles, ending: dict[str, Any]) -> Verdict:
    """Return the state of a job whose newest attempt recorded its end."""
    match code := ending["code"]:
        case ExitCode.DONE:
            return State.DONE, ""
        case ExitCode.DIVERGED:
            return State.DIVERGED, files.reason
        case ExitCode.PREEMPTED:
            by = ending["asked_by"]
            return State.STOPPED, files.reason + (f"; requested by {by}" if by else "")
    detail = f"{files.reason} (exit code {code}, rank {ending['rank']} on {ending['node']})"
    gave_up = None if code in FINAL else _gave_up(files, detail)
    return gave_up or (State.FAILED, detail)


def _gave_up(files: JobFiles, detail: str) -> Verdict | None:
    """Return the state of a job without a new checkpoint in all attempts; None of another one.

    The decision has their number: only the job script counts attempts whose node died, too.
    """
    found = GAVE_UP.match(files.decision)
    attempts = int(found[1]) if found else 0
    if not attempts:
        return None
    return State.OUT_OF_ATTEMPTS, f"{attempts} attempts without a new checkpoint; {detail}"


def _ended_unrecorded(files: JobFiles, ids: Sequence[str], slurm: SlurmJob | None) -> Verdict:
    """Return the state of a job that has recorded no end and is not in the queue."""
    if not files.attempt:
        if slurm is not None:  # the set-up of its node did not finish
            return State.FAILED, f"Slurm state {slurm.state}"
        if ids:
            return State.LOST, f"never started, and Slurm no longer knows job {ids[-1]}"
        return State.NEW, ""
    ended = slurm if slurm is not None and slurm.since >= files.started else None
    # A new attempt writes its first heartbeat after the imports.
    if files.heartbeat is None and ended is None and files.heartbeat_age <= SILENT_SECONDS:
        return State.RUNNING, "starting"
    if (gave_up := _gave_up(files, files.reason)) is not None:
        return gave_up
    if ended is not None:
        return State.FAILED, f"Slurm state {ended.state}; {_saved_work(files, ended)}"
    where = f" on {files.heartbeat['node']}" if files.heartbeat else ""
    age = f"{files.heartbeat_age:.0f} s ago"
    return State.LOST, f"last heartbeat of attempt {files.attempt}{where} {age}"
