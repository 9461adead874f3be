"""The state of jobs, derived from their own files and, where these are inconclusive, from Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dtt.config.load import load_job
from dtt.errors import ConfigError, DttError, ExitCode, InputError
from dtt.launch import squeue, submissions
from dtt.launch.evidence import SILENT_SECONDS, Evidence, requester, slurm_ids
from dtt.launch.squeue import Answer, SlurmJob
from dtt.runtime.jobdir import JobDir

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


WENT_WRONG = (State.FAILED, State.OUT_OF_ATTEMPTS, State.NODE_FAILED, State.LOST)
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
    own: Evidence
    slurm: SlurmJob | None
    """Slurm's record of the job; None if it was never submitted or Slurm does not know it."""
    silence: str | None
    """Reason why Slurm gave no answer; None if it did, or was not asked."""

    @property
    def job(self) -> JobDir:
        """The directory of the job."""
        return self.own.job

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
            next=f"wait for it to end, or dtt job stop {self.job.root}{yes}",
        )

    @property
    def changed(self) -> float:
        """The Unix time at which it was last submitted, started, sent a heartbeat or ended."""
        own = self.own
        beat = own.heartbeat["time"] if own.heartbeat else 0.0
        return max(own.submitted, own.began, own.ended, beat)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the last step, at the current speed; None if unknown."""
        beat, step = self.own.heartbeat, self.own.step
        if not self.own.beats or not beat or step is None or beat["seconds_per_step"] is None:
            return None
        return float((beat["steps"] - step) * beat["seconds_per_step"])

    @property
    def log_tail(self) -> list[str]:
        """The last lines of the log of a failed job; empty for any other job."""
        return self.own.log_tail(LOG_LINES) if self.state in WENT_WRONG else []


def examine(jobs: Sequence[JobDir]) -> list[Status]:
    """Return the state of each job; a single call asks Slurm about all of them."""
    ids = {job.root: slurm_ids(job) for job in jobs}
    for job in jobs:
        ids[job.root] += submissions.find_unanswered(job)
    answer = squeue.ask({id for known in ids.values() for id in known})
    # Read the files last: Slurm may take long to answer, and they change meanwhile.
    return [_status(Evidence.take(job), ids[job.root], answer) for job in jobs]


def find(folder: Path) -> list[JobDir]:
    """Return the jobs in a folder and one level below it, where the trials of sweeps are."""
    if not folder.is_dir():
        raise InputError(f"no folder {folder}", next="run dtt where jobs/ is, or name the folder")
    paths = (path for pattern in ("[!.]*", "[!.]*/*") for path in folder.glob(pattern))
    return [JobDir(path) for path in sorted(paths) if _is_job(path)]


def open_job(path: Path) -> JobDir:
    """Return the job in a folder; InputError if there is none."""
    if _is_job(path):
        return JobDir(path)
    named = Path("jobs") / path
    next = f"name its directory: {named}" if _is_job(named) else "dtt job ls tells which there are"
    raise InputError(f"{path} is not the directory of a job", next=next)


def _is_job(path: Path) -> bool:
    job = JobDir(path)
    return job.config.is_file() or job.attempt() > 0


def _status(own: Evidence, ids: Sequence[str], answer: Answer) -> Status:
    if not ids:  # Slurm was asked about other jobs only, so its silence is irrelevant here
        answer = Answer({})
    slurm = squeue.current([id for id in ids if not _withdrawn(own, answer.jobs.get(id))], answer)
    state, detail = _Case(own, ids, slurm, answer).verdict()
    return Status(state, detail, own, slurm, answer.silence)


def _withdrawn(own: Evidence, slurm: SlurmJob | None) -> bool:
    """Return True for a successor that the job script cancelled when it decided to end the job."""
    return slurm is not None and slurm.id in own.successors and own.over and slurm.withdrawn


Verdict = tuple[State, str]


@dataclass(frozen=True)
class _Case:
    """The derivation of a job's state from its files and Slurm's answer.

    `verdict` tests the cases in order of precedence; most other methods handle one of them.
    """

    own: Evidence
    ids: Sequence[str]
    slurm: SlurmJob | None
    answer: Answer

    def verdict(self) -> Verdict:
        """Return the state and its detail; the first case that applies decides."""
        own, slurm = self.own, self.slurm
        if slurm is not None and slurm.suspended:
            return State.SUSPENDED, f"on {slurm.nodes}, until Slurm resumes it"
        carrier = self.answer.jobs.get(own.ran_as or "")
        # If Slurm no longer runs the job, this is the last heartbeat before its processes died.
        if own.beats and (carrier is None or carrier.running):
            return self.at_work()
        if slurm is not None and slurm.live and self.has_a_future(slurm):
            return self.waiting(slurm) if slurm.queued else self.between(slurm)
        if slurm is not None and self.was_ended_by(slurm):
            return ENDED_BY_SLURM[slurm.state], self.what_is_left()
        if (self.answer.silence or own.unanswered) and not self.settled():
            return self.not_told()
        if own.ending is not None:
            return self.ended(own.ending["code"])
        return self.begun() if own.attempt else self.never_begun()

    def settled(self) -> bool:
        """Return True if the job's own files prove that it has ended, so Slurm's answer is moot."""
        own = self.own
        final = own.ending is not None and own.ending["code"] in FINAL
        return own.over or (final and own.ended > own.submitted)

    def has_a_future(self, slurm: SlurmJob) -> bool:
        """Return True unless the newest attempt had a final ending after `slurm` last changed."""
        own = self.own
        return own.ending is None or own.ending["code"] not in FINAL or slurm.since > own.ended

    def was_ended_by(self, slurm: SlurmJob) -> bool:
        """Return True if Slurm ended the newest attempt, or the job before its first attempt."""
        own = self.own
        if slurm.state not in ENDED_BY_SLURM or (own.ending and own.ending["code"] in FINAL):
            return False
        if submissions.argv(own.job)[0] != "train":  # other commands run only under Slurm
            return True
        return own.ran_as == slurm.id or slurm.since >= own.began

    def at_work(self) -> Verdict:
        """Return the state of a job with a fresh heartbeat."""
        own, job = self.own, self.own.job
        if own.acknowledged is not None and own.acknowledged["request"] == "stop":
            asked = own.acknowledged
            return State.STOPPING, f"asked by {asked['by']}, acknowledged at step {asked['step']}"
        if job.stop.exists():
            return State.STOPPING, f"asked by {requester(job.stop)}, not yet acknowledged"
        if job.save.exists():
            return State.RUNNING, f"asked to save by {requester(job.save)}, not yet acknowledged"
        phase = own.heartbeat["phase"] if own.heartbeat else "start"
        return State.RUNNING, "" if phase == "step" else f"in phase {phase}"

    def waiting(self, slurm: SlurmJob) -> Verdict:
        """Return the state of a job in Slurm's queue."""
        own, why = self.own, f"waits for {slurm.reason or 'its turn'}"
        if not own.attempt:
            return State.QUEUED, why
        before = self.before(slurm)
        if before == "PREEMPTED":
            return State.PREEMPTED, f"{why}; {own.reason}"
        how = f", {before}" if before in ENDED_BY_SLURM else ""
        return State.QUEUED, f"{why}; attempt {own.attempt}{how}: {own.reason}"

    def before(self, slurm: SlurmJob) -> str:
        """Return how the run ended that `slurm` continues, in Slurm's terms; empty if unknown.

        A job that was submitted again by a person does not continue a run.
        """
        own = self.own
        if slurm.id != own.ran_as and slurm.id not in own.successors:
            return ""
        # Slurm's records show a preemption as a requeue or a failure; the job script knows better.
        if own.decision.startswith("again: preempted"):
            return "PREEMPTED"
        carrier = self.answer.jobs.get(own.ran_as or "")
        return slurm.before if carrier is None or carrier.live else carrier.state

    def between(self, slurm: SlurmJob) -> Verdict:
        """Return the state of a job that Slurm runs without a fresh heartbeat.

        It is starting, ending, or its processes are lost.
        """
        own, where = self.own, f"Slurm runs it on {slurm.nodes or 'its nodes'}"
        if slurm.since > own.began:  # the newest attempt belongs to an earlier run
            return State.RUNNING, f"starting: {where}"
        if own.saved:
            return State.STOPPING, own.reason
        if own.ending is not None:
            return State.RUNNING, f"attempt {own.attempt} ended: {own.reason}"
        if own.heartbeat is None:  # not every command writes heartbeats
            return State.RUNNING, where
        if own.silence <= SILENT_SECONDS:
            return State.RUNNING, f"starting: {where}"
        return State.LOST, f"{where}, and it has said nothing for {own.silence:.0f} s"

    def what_is_left(self) -> str:
        """Return what an attempt that Slurm ended has saved, in words."""
        own = self.own
        if not own.attempt:
            return "before it began"
        if own.saved:
            return own.reason
        checkpoint = own.job.newest_checkpoint_name()
        return f"{checkpoint} is the newest checkpoint" if checkpoint else "nothing was saved"

    def ended(self, code: int) -> Verdict:
        """Return the state of a job whose newest attempt wrote exit.json with this exit code."""
        own = self.own
        match code:
            case ExitCode.DONE:
                return State.DONE, ""
            case ExitCode.DIVERGED:
                return State.DIVERGED, own.reason
            case ExitCode.PREEMPTED:
                asked = f"; asked by {own.asked_by}" if own.asked_by else ""
                return State.STOPPED, f"{own.reason}{asked}"
        ending = own.ending or {}
        detail = f"{own.reason} (exit code {code}, rank {ending['rank']} on {ending['node']})"
        if code not in FINAL and self.given_up():
            return State.OUT_OF_ATTEMPTS, f"{own.stalled()} without a new checkpoint; {detail}"
        return State.FAILED, detail

    def begun(self) -> Verdict:
        """Return the state of a job whose newest attempt ended without writing exit.json."""
        own, slurm = self.own, self.slurm
        ended = slurm if slurm is not None and slurm.since >= own.began else None
        if own.heartbeat is None and ended is None and own.silence <= SILENT_SECONDS:
            return State.RUNNING, "starting"
        if self.given_up():
            stalled = own.stalled()
            return State.OUT_OF_ATTEMPTS, f"{stalled} without a new checkpoint; {own.reason}"
        if ended is not None:
            return State.FAILED, f"Slurm says {ended.state}; {self.what_is_left()}"
        where = f" on {own.heartbeat['node']}" if own.heartbeat else ""
        return State.LOST, f"attempt {own.attempt}{where} was last heard {own.silence:.0f} s ago"

    def never_begun(self) -> Verdict:
        """Return the state of a job without any attempt, which is not in Slurm's queue."""
        if self.given_up():
            return State.OUT_OF_ATTEMPTS, f"{self.own.stalled()} that could not even begin"
        if self.slurm is not None:  # the set-up of its node did not finish
            return State.FAILED, f"Slurm says {self.slurm.state}"
        if not self.ids:
            return State.NEW, ""
        return State.LOST, f"it never began, and Slurm does not know job {self.ids[-1]} any more"

    def not_told(self) -> Verdict:
        """Return the state of a job that may be queued or running, because Slurm gave no answer."""
        own, silence = self.own, self.answer.silence
        if own.unanswered:
            silence = silence or "squeue shows no such job yet"
            return State.UNKNOWN, f"sbatch did not say whether Slurm accepted it; {silence}"
        ended = f"; attempt {own.attempt} ended: {own.reason}" if own.ending is not None else ""
        return State.UNKNOWN, f"submitted as {self.ids[-1]}; {silence}{ended}"

    def given_up(self) -> bool:
        """Return True if the job script has used all attempts allowed without a new checkpoint."""
        stalled = self.own.stalled()
        if stalled == 0:
            return False
        try:
            return stalled >= load_job(self.own.job.root).launch.max_stalled_attempts
        except DttError:  # the configuration is damaged; the next command that starts it reports it
            return False
