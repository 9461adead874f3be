"""The state of jobs, as true as it can be told: from a job's own files first, then from Slurm."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from dtt.config.load import load_job
from dtt.errors import ExitCode, InputError
from dtt.launch import squeue
from dtt.launch.squeue import Answer, SlurmJob
from dtt.runtime.jobdir import JobDir

SILENT_SECONDS = 60
"""A job that has given no sign of life for so long is lost."""
FINAL = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.DAMAGED,
    ExitCode.INPUT_MISSING,
    ExitCode.DIVERGED,
    ExitCode.INTERRUPTED,
)
"""Endings after which the job script does not try again."""
SUBMISSIONS = 3
"""So many of a job's newest submissions may matter: a chain has one running and one queued."""
LOG_LINES = 5


class State(StrEnum):
    """What a job is doing, or how it ended."""

    NEW = "never started"
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
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

    @property
    def alive(self) -> bool:
        """Whether processes of the job can hear a request."""
        return self in (State.RUNNING, State.STOPPING)


ENDED_BY_SLURM = {
    "CANCELLED": State.CANCELLED,
    "DEADLINE": State.TIMED_OUT,
    "NODE_FAIL": State.NODE_FAILED,
    "BOOT_FAIL": State.NODE_FAILED,
    "PREEMPTED": State.PREEMPTED,
    "TIMEOUT": State.TIMED_OUT,
}


@dataclass(frozen=True)
class Status:
    """All that is known of a job; None where nothing is."""

    job: JobDir
    state: State
    detail: str
    """What a person wants to know next, in a line; may be empty."""
    time: float
    """When the job last gave a sign of life, was submitted or started (unix)."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    step: int | None
    steps: int | None
    seconds_per_step: float | None
    tokens_per_second: float | None
    heartbeat: dict[str, Any] | None
    """The newest attempt's."""
    ending: dict[str, Any] | None
    """exit.json of the newest attempt."""
    acknowledged: dict[str, Any] | None
    """The newest attempt's last answer to a request."""
    checkpoint: str | None
    slurm: SlurmJob | None
    silence: str | None
    """Why Slurm could not be asked, if it should have been."""
    log_tail: tuple[str, ...]
    """Last lines of the log of a job that went wrong."""

    @property
    def waits(self) -> bool:
        """Whether Slurm has it in the queue."""
        return not self.state.alive and self.slurm is not None and self.slurm.queued

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the present speed."""
        if not self.state.alive or None in (self.step, self.steps, self.seconds_per_step):
            return None
        return max(0, self.steps - self.step) * self.seconds_per_step  # type: ignore[operator]


def examine(jobs: Sequence[JobDir]) -> list[Status]:
    """The state of each job; Slurm is asked about all of them at once."""
    notes = [_Notes.take(job) for job in jobs]
    answer = squeue.ask({id for note in notes for id in note.ids})
    return [note.status(answer) for note in notes]


def find(folder: Path) -> list[JobDir]:
    """The jobs in a folder, and one level below: the trials of sweeps."""
    if not folder.is_dir():
        raise InputError(f"no folder {folder}", next="run dtt where jobs/ is, or name the folder")
    paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return [JobDir(path) for path in sorted(paths) if is_job(path)]


def is_job(path: Path) -> bool:
    """Whether a folder is that of a job, begun or only submitted."""
    job = JobDir(path)
    return job.config.is_file() or job.script.is_file() or (path / "attempts").is_dir()


def open_job(path: Path) -> JobDir:
    """The job in a folder; InputError if there is none."""
    if is_job(path):
        return JobDir(path)
    named = Path("jobs") / path
    raise InputError(
        f"{path} is not the directory of a job",
        next=f"name its directory: {named}" if is_job(named) else "dtt job ls shows those there are",
    )


@dataclass(frozen=True)
class _Notes:
    """What a job's own files say."""

    job: JobDir
    ids: tuple[str, ...]
    """Slurm's ids of its last submissions, the newest last."""
    ran_as: str | None
    """Slurm's id of the newest attempt."""
    submitted: float
    attempt: int
    began: float
    """When the newest attempt did; 0 before the first."""
    ending: dict[str, Any] | None
    ended: float
    beat: dict[str, Any] | None
    """Heartbeat of the newest attempt."""
    steps: int | None
    """Of the whole run, as any attempt has told."""
    acknowledged: dict[str, Any] | None
    now: float

    @classmethod
    def take(cls, job: JobDir) -> _Notes:
        number = job.attempt()
        folder = job.attempt_dir(number)
        began = _modified(folder / "ranks") or _modified(folder) if number else 0.0
        beat = _read(job.heartbeat)
        answered = _read(job.acknowledged)
        submissions = list(_records(job.submissions))[-SUBMISSIONS:]
        ran_as = _slurm_id(job, began)
        ids = dict.fromkeys(str(record["job_id"]) for record in submissions)
        return cls(
            job=job,
            # One that was handed over by plain sbatch is known from what the attempt has noted.
            ids=tuple(ids if ran_as is None or ran_as in ids else [ran_as, *ids]),
            ran_as=ran_as,
            submitted=submissions[-1]["time"] if submissions else 0.0,
            attempt=number,
            began=began,
            ending=job.exit_record(number) if number else None,
            ended=_modified(folder / "exit.json"),
            beat=beat if beat is not None and beat["attempt"] == number else None,
            steps=beat and beat["steps"],
            acknowledged=answered if answered and answered["time"] >= began else None,
            now=time.time(),
        )

    def status(self, answer: Answer) -> Status:
        slurm = squeue.current(self.ids, answer)
        state, detail = self._state(slurm, answer)
        perf = [r for r in _records(self.job.metrics, tail=2**16) if r["kind"] == "perf"]
        wrong = state in (State.FAILED, State.OUT_OF_ATTEMPTS, State.LOST, State.NODE_FAILED)
        steps = [s for s in (self.job.last_step(), (self.beat or {}).get("step")) if s is not None]
        return Status(
            job=self.job,
            state=state,
            detail=detail,
            time=max(self.submitted, self.began, self.ended, (self.beat or {}).get("time", 0.0)),
            attempt=self.attempt,
            step=max(steps, default=None),
            steps=self.steps,
            seconds_per_step=(self.beat or {}).get("seconds_per_step"),
            tokens_per_second=perf[-1]["tokens_per_second"] if perf else None,
            heartbeat=self.beat,
            ending=self.ending,
            acknowledged=self.acknowledged,
            checkpoint=self.job.newest_checkpoint_name(),
            slurm=slurm,
            silence=answer.silence if self.ids else None,
            log_tail=tuple(log_tail(self.job)) if wrong else (),
        )

    def _state(self, slurm: SlurmJob | None, answer: Answer) -> tuple[State, str]:
        own = answer.jobs.get(self.ran_as or "")
        if self._beating() and (own is None or own.running):
            return self._running()
        if slurm is not None and slurm.live and self._goes_on(slurm):
            return self._queued(slurm) if slurm.queued else self._between(slurm)
        if slurm is not None and not slurm.live and self._ended_by(slurm):
            return ENDED_BY_SLURM[slurm.state], self._what_is_left(slurm)
        if self.ending is not None:
            return self._ended()
        return self._without_ending(slurm, answer)

    def _beating(self) -> bool:
        beat = self.beat
        if beat is None or self.ending is not None or self.now - beat["time"] > SILENT_SECONDS:
            return False
        return beat["node"] != socket.gethostname() or psutil.pid_exists(beat["pid"])

    def _running(self) -> tuple[State, str]:
        phase = (self.beat or {})["phase"]
        if self.acknowledged is not None and self.acknowledged["request"] == "stop":
            by, step = self.acknowledged["by"], self.acknowledged["step"]
            return State.STOPPING, f"asked by {by}, acknowledged at step {step}"
        if self.job.stop.exists():
            return State.STOPPING, f"asked by {first_line(self.job.stop)}, not yet acknowledged"
        if phase == "stop":
            return State.STOPPING, "leaving"
        if self.job.save.exists():
            return State.RUNNING, f"asked to save by {first_line(self.job.save)}"
        return State.RUNNING, "" if phase == "step" else f"in phase {phase}"

    def _goes_on(self, slurm: SlurmJob) -> bool:
        """Whether what Slurm has live comes after the newest attempt's end."""
        return self.ending is None or self.ending["code"] not in FINAL or slurm.since > self.ended

    def _queued(self, slurm: SlurmJob) -> tuple[State, str]:
        waits = f"waits for {slurm.reason or 'its turn'}"
        if not self.attempt:
            return State.QUEUED, waits
        why = first(self.ending["reason"]) if self.ending else "did not tell how it ended"
        # Accounting knows; without it, Slurm's SIGTERM and its own requeue tell.
        by_signal = self._saved() and "SIGTERM" in self.ending["reason"] if self.ending else False
        if slurm.before == "PREEMPTED" or (not slurm.before and by_signal):
            return State.PREEMPTED, f"{waits}; {why}"
        note = f" ({slurm.before})" if slurm.before in ENDED_BY_SLURM else ""
        return State.QUEUED, f"{waits}; attempt {self.attempt}{note}: {why}"

    def _between(self, slurm: SlurmJob) -> tuple[State, str]:
        """Slurm runs it, and no heartbeat says so: it starts, it ends, or it hangs."""
        where = f"Slurm runs it on {slurm.nodes or 'its nodes'}"
        if slurm.since > self.began:  # the newest attempt is of an earlier run
            return State.RUNNING, f"starting: {where}"
        if self.ending is not None:
            if self._saved():
                return State.STOPPING, first(self.ending["reason"])
            return State.RUNNING, f"attempt {self.attempt} ended: {first(self.ending['reason'])}"
        silent = self.now - max(self.began, (self.beat or {}).get("time", 0.0))
        if silent <= SILENT_SECONDS:
            return State.RUNNING, f"starting: {where}"
        return State.LOST, f"{where}, and it has said nothing for {silent:.0f} s"

    def _ended_by(self, slurm: SlurmJob) -> bool:
        """Whether Slurm ended the newest attempt, or the job before there was any."""
        if slurm.state not in ENDED_BY_SLURM:
            return False
        if self.ending is not None and self.ending["code"] in FINAL:
            return False
        return self.ran_as == slurm.id or slurm.since >= self.began

    def _what_is_left(self, slurm: SlurmJob) -> str:
        if not self.attempt:
            return f"job {slurm.id} ended in Slurm before the first attempt"
        if self._saved():
            return first(self.ending["reason"]) if self.ending else ""
        checkpoint = self.job.newest_checkpoint_name()
        return f"the newest checkpoint is {checkpoint}" if checkpoint else "nothing was saved"

    def _ended(self) -> tuple[State, str]:
        ending = self.ending or {}
        detail = first(ending["reason"])
        match ending["code"]:
            case ExitCode.DONE:
                return State.DONE, ""
            case ExitCode.PREEMPTED:
                why = [x for x in ending["reason"].splitlines() if x.strip().startswith("why:")]
                by = f", asked by {why[0].split('why:')[1].strip()}" if why else ""
                return State.STOPPED, detail + by
            case ExitCode.DIVERGED:
                return State.DIVERGED, detail
        where = f"exit code {ending['code']}, rank {ending['rank']} on {ending['node']}"
        stalled = self._stalled() if ending["code"] not in FINAL else 0
        if stalled:
            return (
                State.OUT_OF_ATTEMPTS,
                f"{stalled} in a row without a new checkpoint; the last: {detail} ({where})",
            )
        return State.FAILED, f"{detail} ({where})"

    def _without_ending(self, slurm: SlurmJob | None, answer: Answer) -> tuple[State, str]:
        """No process was left to say how it ended, or there never was one."""
        if slurm is None and not self.attempt:
            if answer.silence and self.ids:
                return State.UNKNOWN, f"Slurm does not answer: {answer.silence}"
            if self.ids:
                return State.LOST, f"it never started, and Slurm no longer knows job {self.ids[-1]}"
            return State.NEW, ""
        if slurm is not None and slurm.state == "COMPLETED" and not self.attempt:
            return State.DONE, f"Slurm job {slurm.id}"
        if stalled := self._stalled():
            return State.OUT_OF_ATTEMPTS, f"{stalled} in a row without a new checkpoint"
        if slurm is not None and not slurm.live and slurm.since >= self.began:
            return State.FAILED, f"Slurm says {slurm.state}; {self._what_is_left(slurm)}"
        if not slurm and self.beat is None and self.now - self.began <= SILENT_SECONDS:
            return State.RUNNING, "starting"
        said = self.now - max(self.began, (self.beat or {}).get("time", 0.0))
        where = f" on {self.beat['node']}" if self.beat else ""
        note = f"; Slurm does not answer: {answer.silence}" if answer.silence and self.ids else ""
        return State.LOST, f"attempt {self.attempt}{where} said nothing for {said:.0f} s{note}"

    def _saved(self) -> bool:
        return self.ending is not None and self.ending["code"] == ExitCode.PREEMPTED

    def _stalled(self) -> int:
        """Attempts without a new checkpoint, if the job script has given up; else 0."""
        try:
            count = int((self.job.root / "stalled").read_text().split()[1])
            return count if count >= load_job(self.job.root).launch.max_stalled_attempts else 0
        except (OSError, IndexError, ValueError):
            return 0


def first(text: str) -> str:
    """The first line of a message."""
    return text.splitlines()[0] if text else ""


def first_line(path: Path) -> str:
    """The first line of a request: who asked, and why."""
    try:
        return first(path.read_text(encoding="utf-8", errors="replace")) or f"control/{path.name}"
    except OSError:
        return f"control/{path.name}"


def log_tail(job: JobDir) -> list[str]:
    """The last lines that say anything in the newest log."""
    newest = max(job.logs.glob("*.log"), key=_modified, default=None)
    if newest is None:
        return []
    with newest.open("rb") as file:
        file.seek(max(0, _size(newest) - 2**14))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-LOG_LINES:]


def _slurm_id(job: JobDir, began: float) -> str | None:
    """Slurm's id of the attempt that began then; None outside Slurm, and before it has noted it."""
    path = job.root / "env.json"
    record = _read(path)
    if record is None or _modified(path) < began:
        return None
    env = record["environment"]
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    found: str | None = env.get("SLURM_JOB_ID")
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """A small JSON file; None if it is not there (a moment ago it may have been)."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return record


def _records(path: Path, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file, or of its last `tail` bytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if tail is not None:
            file.seek(max(0, _size(path) - tail))
        for line in file:
            if line.startswith(b"{") and line.endswith(b"}\n"):
                yield json.loads(line)


def _modified(path: Path) -> float:
    """When a file was last changed (unix); 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    return os.stat(path).st_size
