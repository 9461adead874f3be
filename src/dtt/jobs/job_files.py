"""The files of a job directory that describe its state; `job_state` interprets them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtt.artifacts.jobdir import ANSWER, HEARTBEAT, TAIL, JobDir, ending_of
from dtt.base.reading import is_kind, read_record, read_records, read_small

SILENT_SECONDS = 60
"""Age in seconds above which a heartbeat is stale; a live process rewrites it every few seconds."""


@dataclass(frozen=True)
class JobFiles:
    """A snapshot of a job's files. Times are Unix seconds, 0 for events that have not happened."""

    job: JobDir
    submission: dict[str, Any]
    """Content of submission.json; empty if the job was never submitted."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    record: dict[str, Any]
    """Content of attempt.json of the newest attempt; empty before the first."""
    ending: dict[str, Any] | None
    """How the newest attempt ended; None if that is not recorded."""
    heartbeat: dict[str, Any] | None
    """Heartbeat of the newest attempt; None if there is none."""
    steps: int | None
    """Total number of steps of the run, as reported by any attempt."""
    acknowledged: dict[str, Any] | None
    """Last acknowledgement of a request by the newest attempt."""
    alive: bool
    """True if a fresh heartbeat shows that a process of the newest attempt is alive."""
    now: float

    @classmethod
    def read(cls, job: JobDir) -> JobFiles:
        """Read the files of a job."""
        number, now = job.attempt(), time.time()
        record = job.attempt_record(number) or {}
        ending, beat = ending_of(record), read_record(job.heartbeat, HEARTBEAT)
        steps = beat["steps"] if beat is not None else None
        # Heartbeat and acknowledgement outlive an attempt, and a new one may not have its own yet.
        if beat is not None and beat["attempt"] != number:
            beat = None
        answered = read_record(job.acknowledged, ANSWER)
        if answered is not None and answered["time"] < record.get("started", 0.0):
            answered = None
        # A fresh heartbeat is not enough: the process may have recorded its end since, or have died
        # without that. On another node its pid means another process.
        alive = beat is not None and ending is None and now - beat["time"] <= SILENT_SECONDS
        if alive and beat is not None and beat["node"] == socket.gethostname():
            alive = psutil.pid_exists(beat["pid"])
        submission = job.submission_record() or {}
        return cls(job, submission, number, record, ending, beat, steps, answered, alive, now)

    @property
    def started(self) -> float:
        """Start time of the newest attempt."""
        return float(self.record.get("started", 0.0))

    @property
    def ended(self) -> float:
        """Time at which the newest attempt recorded its end."""
        return float(self.ending["ended"]) if self.ending else 0.0

    @property
    def submitted(self) -> float:
        """Time of the newest submission."""
        return float(self.submission.get("time", 0.0))

    @property
    def slurm_ids(self) -> list[str]:
        """Slurm's ids of the newest attempt and the newest submission, newest last.

        Others are over: a job is submitted again only when nothing of it is in the queue.
        """
        submitted, own = self.submission.get("job_id"), self.record.get("slurm")
        ids = (own, submitted) if self.submitted > self.started else (submitted, own)
        return list(dict.fromkeys(str(id) for id in ids if is_kind(id, str)))

    @property
    def unanswered(self) -> bool:
        """True if sbatch did not answer the newest submission and no attempt has started since."""
        asked = bool(self.submission) and self.submission["job_id"] is None
        return asked and self.submitted > self.started

    @property
    def decision(self) -> str:
        """Decision of the supervisor after the newest attempt: `again: …` or `over: …`.

        Empty without one, and if the job was submitted again since.
        """
        decision, decided = self.record.get("decision"), self.record.get("decided")
        if not (is_kind(decision, str) and is_kind(decided, float)) or decided is None:
            return ""
        return str(decision) if decided > max(self.started, self.submitted) else ""

    @property
    def decided_to_end(self) -> bool:
        """True if the job script decided that the job does not continue."""
        return self.decision.startswith("over:")

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the newest heartbeat of the newest attempt, or since its start."""
        return self.now - max(self.started, self.heartbeat["time"] if self.heartbeat else 0.0)

    @property
    def reason(self) -> str:
        """The reason why the newest attempt ended, in one line."""
        return first_line(self.ending["reason"]) if self.ending else "no reason was recorded"

    @property
    def step(self) -> int | None:
        """The last step that is known to be complete; None before the first."""
        beat = self.heartbeat["step"] if self.heartbeat else None
        # Metrics are written at log lines, heartbeats every few seconds: either may be ahead.
        return max((s for s in (self.job.last_step(), beat) if s is not None), default=None)

    @property
    def is_stage(self) -> bool:
        """True if the job is one of several stages, which may share a Slurm job."""
        return self.job.stage_record() is not None

    def measured(self) -> dict[str, float | None]:
        """Return the newest loss, number of tokens, tokens per second and validation loss."""
        records = read_records(self.job.metrics, {"kind": str}, last=TAIL)
        newest = {record["kind"]: record for record in records}

        def number(kind: str, name: str) -> float | None:
            value = newest.get(kind, {}).get(name)
            return value if is_kind(value, float) else None

        return {
            "loss": number("train", "loss"),
            "tokens": number("train", "tokens"),
            "tokens_per_second": number("perf", "tokens_per_second") if self.alive else None,
            "eval_loss": number("eval", "loss"),
        }


def newest_log(job: JobDir, node: str | None = None) -> Path | None:
    """Return the newest attempt's log, of its first node or of `node`; None if there is none.

    The `node` "slurm" selects the log of the job script itself. Without a link `latest….log`,
    the most recently modified log is returned.
    """
    latest = job.logs / (f"latest-{node}.log" if node else "latest.log")
    if latest.is_file():
        return latest
    others = job.logs.glob("*.log" if node in (None, "slurm") else f"*-{node}.log")
    modified = {p.stat().st_mtime: p for p in others if p.is_file()}  # not a link to nothing
    return modified[max(modified)] if modified else None


def last_lines(log: Path, lines: int) -> list[str]:
    """Return the last non-empty lines of a file."""
    with log.open("rb") as file:  # of which the end suffices: a log may have gigabytes
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read(TAIL).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def first_line(text: str) -> str:
    """Return the first line of a message."""
    return text.splitlines()[0] if text else ""


def trigger_lines(trigger: Path) -> list[str]:
    """Return the lines of a trigger file: who asked and why, then details such as a profile kind.

    An empty or missing file counts as one with its own name, `control/NAME`, in its first line.
    """
    try:
        text = read_small(trigger).decode(errors="replace")
    except (OSError, ValueError):
        text = ""
    first, *others = text.splitlines() or [""]
    return [first if first.strip() else f"control/{trigger.name}", *others]


def job_argv(job: JobDir) -> list[str]:
    """Return the arguments of dtt with which a job runs."""
    # Without a submission, it was only trained without Slurm.
    submission = job.submission_record() or {"argv": ["train", str(job.root)]}
    return [str(argument) for argument in submission["argv"]] or ["train", str(job.root)]
