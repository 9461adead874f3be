"""The state of jobs, derived from their own files and, where these are inconclusive, from Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode, InputError
from dtt.jobs.job_files import SILENT_SECONDS, JobFiles
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


class State(StrEnum):
    """The state of a job: its current activity, or how it ended."""

    NEW = "never started"
    UNSENT = "not submitted"
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
        return self.files.log_tail(LOG_LINES) if self.state in FAILURES else []


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
    slurm = squeue.current([id for id in ids if not _withdrawn(files, answer.jobs.get(id))], answer)
    state, detail = _Derivation(files, ids, slurm, answer).verdict()
    return Status(state, detail, files, slurm, answer.error)


def _withdrawn(files: JobFiles, slurm: SlurmJob | None) -> bool:
    """Return True for a successor that the job script cancelled when it decided to end the job."""
    successor = slurm is not None and slurm.id == files.successor
    return successor and files.decided_to_end and slurm is not None and slurm.withdrawn


Verdict = tuple[State, str]


@dataclass(frozen=True)
class _Derivation:
    """The derivation of a job's state: a pure function of its files and Slurm's answer.

    `verdict` tests the cases in order of precedence; most other methods handle one of them.
    """

    files: JobFiles
    ids: Sequence[str]
    slurm: SlurmJob | None
    answer: QueueReply

    def verdict(self) -> Verdict:
        """Return the state and its detail; the first case that applies decides."""
        files, slurm = self.files, self.slurm
        # Before the heartbeat, which is old: stopped processes write none.
        if slurm is not None and slurm.suspended:
            return State.SUSPENDED, f"on {slurm.nodes}, until Slurm resumes it"
        slurm_job = self.answer.jobs.get(files.slurm_id or "")
        # If Slurm no longer runs the job, this is the last heartbeat before its processes died.
        # Files first. They are newer than Slurm's view, and present without Slurm.
        if files.alive and (slurm_job is None or slurm_job.running):
            return self.running()
        # Slurm says it is alive, and the files do not say that it is over.
        if slurm is not None and slurm.live and self.may_continue(slurm):
            return self.in_queue(slurm) if slurm.queued else self.without_heartbeat(slurm)
        if slurm is not None and self.ended_by_slurm(slurm):
            return ENDED_BY_SLURM[slurm.state], self.saved_work()
        # No answer is not `gone`: a job that may still be queued must not be started twice.
        if (self.answer.error or files.unanswered) and not self.settled():
            return self.unknown()
        if files.ending is not None:
            return self.ended(files.ending["code"])
        return self.ended_unrecorded() if files.attempt else self.never_started()

    def settled(self) -> bool:
        """Return True if the job's own files prove that it has ended; Slurm's answer is ignored."""
        files = self.files
        final = files.ending is not None and files.ending["code"] in FINAL
        return files.decided_to_end or (final and files.ended > files.submitted)

    def may_continue(self, slurm: SlurmJob) -> bool:
        """Return True unless the newest attempt had a final ending after `slurm` last changed.

        The job script still runs when it has decided that the job does not continue, and writes the
        report. Slurm may then requeue the job all the same, such as after a failed node.
        """
        files = self.files
        if files.decided_to_end and not slurm.queued:
            return False
        # The Slurm job of a pipeline trains all stages, so it lives on after one is done.
        done = files.ending is not None and files.ending["code"] == ExitCode.DONE
        if done and files.is_stage:
            return False  # its Slurm job continues with the next stage
        return (
            files.ending is None or files.ending["code"] not in FINAL or slurm.since > files.ended
        )

    def ended_by_slurm(self, slurm: SlurmJob) -> bool:
        """Return True if Slurm ended the newest attempt, or the job before its first attempt."""
        files = self.files
        if slurm.state not in ENDED_BY_SLURM or (files.ending and files.ending["code"] in FINAL):
            # A final exit code outranks how Slurm ended the batch script afterwards.
            return False
        if not files.trains:
            return True
        # An older job's end says nothing about an attempt that started later.
        return files.slurm_id == slurm.id or slurm.since >= files.started

    def running(self) -> Verdict:
        """Return the state of a job with a fresh heartbeat."""
        files = self.files
        if files.acknowledged is not None and files.acknowledged["request"] == "stop":
            answer = files.acknowledged
            return (
                State.STOPPING,
                f"requested by {answer['by']}, acknowledged at step {answer['step']}",
            )
        match files.request:
            case "stop", by:
                return State.STOPPING, f"requested by {by}, not yet acknowledged"
            case "save", by:
                return State.RUNNING, f"save requested by {by}, not yet acknowledged"
        phase = files.heartbeat["phase"] if files.heartbeat else "start"
        return State.RUNNING, "" if phase == "step" else f"in phase {phase}"

    def in_queue(self, slurm: SlurmJob) -> Verdict:
        """Return the state of a job in Slurm's queue."""
        files, why = self.files, f"waiting in the queue ({slurm.reason or 'no reason given'})"
        if not files.attempt:
            return State.QUEUED, why
        previous = self.previous_ending(slurm)
        if previous == "PREEMPTED":
            return State.PREEMPTED, f"{why}; {files.reason}"
        how = f", {previous}" if previous in ENDED_BY_SLURM else ""
        return State.QUEUED, f"{why}; attempt {files.attempt}{how}: {files.reason}"

    def previous_ending(self, slurm: SlurmJob) -> str:
        """Return, in Slurm's terms, how the run that `slurm` continues ended; empty if unknown.

        A job that a user submitted again does not continue a run.
        """
        files = self.files
        # Only a requeue or a successor continues a run.
        if slurm.id not in (files.slurm_id, files.successor):
            return ""
        # Slurm's records show a preemption as a requeue or a failure; the job script knows better.
        if files.decision.startswith("again: preempted"):
            return "PREEMPTED"
        slurm_job = self.answer.jobs.get(files.slurm_id or "")
        return slurm.before if slurm_job is None or slurm_job.live else slurm_job.state

    def without_heartbeat(self, slurm: SlurmJob) -> Verdict:
        """Return the state of a job that Slurm runs without a fresh heartbeat.

        It is starting, ending, or its processes are lost.
        """
        files, where = self.files, f"Slurm job on {slurm.nodes or 'its nodes'}"
        if slurm.since > files.started:  # the newest attempt belongs to an earlier run
            return State.RUNNING, f"starting: {where}"
        if files.saved:
            return State.STOPPING, files.reason
        if files.ending is not None:
            return State.RUNNING, f"attempt {files.attempt} ended: {files.reason}"
        if files.heartbeat is None:  # not every command writes heartbeats
            return State.RUNNING, where
        if files.heartbeat_age <= SILENT_SECONDS:
            return State.RUNNING, f"starting: {where}"
        return State.LOST, f"{where}, no heartbeat for {files.heartbeat_age:.0f} s"

    def saved_work(self) -> str:
        """Return a description of the work that an attempt ended by Slurm has saved."""
        files = self.files
        if self.slurm is not None and self.slurm.reason == "DependencyNeverSatisfied":
            return "the job that it waited for did not succeed"
        if not files.attempt:
            return "before it started"
        if files.saved:
            return files.reason
        checkpoint = files.checkpoint
        return f"{checkpoint} is the newest checkpoint" if checkpoint else "nothing was saved"

    def ended(self, code: int) -> Verdict:
        """Return the state of a job whose newest attempt recorded its end with this exit code."""
        files = self.files
        match code:
            case ExitCode.DONE:
                return State.DONE, ""
            case ExitCode.DIVERGED:
                return State.DIVERGED, files.reason
            case ExitCode.PREEMPTED:
                requested = f"; requested by {files.asked_by}" if files.asked_by else ""
                return State.STOPPED, f"{files.reason}{requested}"
        ending = files.ending or {}
        detail = f"{files.reason} (exit code {code}, rank {ending['rank']} on {ending['node']})"
        if code not in FINAL and files.stalled:
            return (
                State.OUT_OF_ATTEMPTS,
                f"{files.stalled} attempts without a new checkpoint; {detail}",
            )
        return State.FAILED, detail

    def ended_unrecorded(self) -> Verdict:
        """Return the state of a job whose newest attempt recorded no end."""
        files, slurm = self.files, self.slurm
        ended = slurm if slurm is not None and slurm.since >= files.started else None
        # A new attempt writes its first heartbeat after the imports.
        if files.heartbeat is None and ended is None and files.heartbeat_age <= SILENT_SECONDS:
            return State.RUNNING, "starting"
        if files.stalled:
            return (
                State.OUT_OF_ATTEMPTS,
                f"{files.stalled} attempts without a new checkpoint; {files.reason}",
            )
        if ended is not None:
            return State.FAILED, f"Slurm state {ended.state}; {self.saved_work()}"
        where = f" on {files.heartbeat['node']}" if files.heartbeat else ""
        return (
            State.LOST,
            f"last heartbeat of attempt {files.attempt}{where} {files.heartbeat_age:.0f} s ago",
        )

    def never_started(self) -> Verdict:
        """Return the state of a job without any attempt, which is not in Slurm's queue."""
        if self.slurm is not None:  # the set-up of its node did not finish
            return State.FAILED, f"Slurm state {self.slurm.state}"
        if not self.ids and self.files.unsent:
            return State.UNSENT, f"run sbatch {self.files.job.script}"
        if not self.ids:
            return State.NEW, ""
        return State.LOST, f"never started, and Slurm no longer knows job {self.ids[-1]}"

    def unknown(self) -> Verdict:
        """Return the state of a job that may be queued or running, because Slurm did not
        respond."""
        files, error = self.files, self.answer.error
        if files.unanswered:
            error = error or "squeue does not list it yet"
            return State.UNKNOWN, f"sbatch did not report whether Slurm accepted it; {error}"
        ended = (
            f"; attempt {files.attempt} ended: {files.reason}" if files.ending is not None else ""
        )
        return State.UNKNOWN, f"submitted as {self.ids[-1]}; {error}{ended}"
