"""The files of a job directory that describe its state; `job_state` interprets them."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtt.artifacts.jobdir import ANSWER, HEARTBEAT, TAIL, JobDir, ending_of
from dtt.base.errors import ExitCode
from dtt.base.reading import Kind, is_kind, read_record, read_records, read_small

SILENT_SECONDS = 60
"""Age in seconds above which a heartbeat is stale; a live process rewrites it every few seconds."""
GAVE_UP = re.compile(r"over: .*?\b([0-9]{1,9}) consecutive attempts\b")
"""The decision of a supervisor that has used all attempts allowed without a new checkpoint."""


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
        ending = ending_of(record)
        beat = read_record(job.heartbeat, HEARTBEAT)
        answered = read_record(job.acknowledged, ANSWER)
        # The heartbeat file outlives an attempt, and a new one may not have written its own yet.
        latest_heartbeat = beat if beat is not None and beat["attempt"] == number else None
        return cls(
            job=job,
            submission=job.submission_record() or {},
            attempt=number,
            record=record,
            ending=ending,
            heartbeat=latest_heartbeat,
            steps=beat["steps"] if beat is not None else None,
            # The same for an acknowledgement.
            acknowledged=answered
            if answered and answered["time"] >= record.get("started", 0.0)
            else None,
            alive=latest_heartbeat is not None
            and ending is None
            # A fresh heartbeat is not enough: the process may have recorded its end since.
            and _is_fresh(latest_heartbeat, now),
            now=now,
        )

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
    def slurm_id(self) -> str | None:
        """Slurm's id of the newest attempt; None outside Slurm."""
        return self.record.get("slurm")

    @property
    def successor(self) -> str | None:
        """Slurm's id of the job that the supervisor of the newest attempt has submitted."""
        id = self.record.get("successor")
        return id if is_kind(id, str) else None

    @property
    def slurm_ids(self) -> list[str]:
        """Slurm's ids of the newest attempt, its successor and the newest submission, newest last.

        Others are over: a job is submitted again only when nothing of it is in the queue. The
        supervisor records those that train several stages in turn with their submission.
        """
        given = (self.submission.get(key) for key in ("job_id", "slurm", "successor"))
        submitted = [id if is_kind(id, str) else None for id in given]
        chain = [self.slurm_id, self.successor]
        ids = chain + submitted if self.submitted > self.started else submitted + chain
        return list(dict.fromkeys(id for id in ids if id is not None))

    @property
    def unsent(self) -> bool:
        """True if `dtt submit --no-submit` wrote the newest submission, for a later sbatch."""
        return self.submission.get("sent") is False

    @property
    def unanswered(self) -> bool:
        """True if sbatch did not answer the newest submission and no attempt has started since."""
        silent = bool(self.submission) and self.submission["job_id"] is None and not self.unsent
        return silent and self.submitted > self.started

    @property
    def decision(self) -> str:
        """Decision of the supervisor after the newest attempt: `again: …` or `over: …`.

        Empty without one, and if the job was submitted again since.
        """
        decision, decided = self.record.get("decision"), self.record.get("decided")
        if not (is_kind(decision, str) and is_kind(decided, float)):
            return ""
        since = max(self.started, self.submitted)
        return str(decision) if decided is not None and decided > since else ""

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the newest heartbeat of the newest attempt, or since its start."""
        return self.now - max(self.started, self.heartbeat["time"] if self.heartbeat else 0.0)

    @property
    def saved(self) -> bool:
        """True if the newest attempt ended on request, with all of its work saved."""
        return self.ending is not None and self.ending["code"] == ExitCode.PREEMPTED

    @property
    def reason(self) -> str:
        """The reason why the newest attempt ended, in one line."""
        return first_line(self.ending["reason"]) if self.ending else "no reason was recorded"

    @property
    def asked_by(self) -> str:
        """The origin of the stop request that ended the newest attempt; empty if unknown."""
        return str(self.ending["asked_by"]) if self.ending else ""

    @property
    def step(self) -> int | None:
        """The last step that is known to be complete; None before the first."""
        beat = self.heartbeat["step"] if self.heartbeat else None
        # Metrics are written at log lines, heartbeats every few seconds: either may be ahead.
        return max((s for s in (self.job.last_step(), beat) if s is not None), default=None)

    @property
    def checkpoint(self) -> str | None:
        """Name of the newest checkpoint; None if there is none."""
        return self.job.newest_checkpoint_name()

    @property
    def trains(self) -> bool:
        """True if the job runs `dtt train`; other commands run only under Slurm."""
        return job_argv(self.job)[0] == "train"

    @property
    def is_stage(self) -> bool:
        """True if the job is one of several stages, which may share a Slurm job."""
        return self.job.stage_record() is not None

    @property
    def request(self) -> tuple[str, str] | None:
        """The pending request, `stop` or else `save`, and who made it; None without one."""
        triggers = (self.job.stop, self.job.save)
        return next(((path.name, requester(path)) for path in triggers if path.exists()), None)

    @property
    def decided_to_end(self) -> bool:
        """True if the job script decided that the job does not continue."""
        return self.decision.startswith("over:")

    def measured(self) -> dict[str, float | None]:
        """Return the newest loss, number of tokens, tokens per second and validation loss."""
        newest = {record["kind"]: record for record in tail(self.job.metrics, {"kind": str})}

        def number(kind: str, name: str) -> float | None:
            value = newest.get(kind, {}).get(name)
            return value if is_kind(value, float) else None

        return {
            "loss": number("train", "loss"),
            "tokens": number("train", "tokens"),
            "tokens_per_second": number("perf", "tokens_per_second") if self.alive else None,
            "eval_loss": number("eval", "loss"),
        }

    @property
    def stalled(self) -> int:
        """Number of attempts without a new checkpoint after which the job script gave up; else 0.

        Its decision has it: only the job script counts, also attempts whose node died.
        """
        found = GAVE_UP.match(self.decision)
        return int(found[1]) if found else 0

    def log_tail(self, lines: int) -> list[str]:
        """Return the last non-empty lines of the log that best explains how the job ended."""
        log = newest_log(self.job) if self.attempt else newest_log(self.job, "slurm")
        return last_lines(log, lines) if log else []


def newest_log(job: JobDir, node: str | None = None) -> Path | None:
    """Return the newest attempt's log, of its first node or of `node`; None if there is none.

    The `node` "slurm" selects the log of the job script itself. Without a link `latest….log`,
    the most recently modified log is returned.
    """
    latest = job.logs / (f"latest-{node}.log" if node else "latest.log")
    if latest.is_file():
        return latest
    others = job.logs.glob("*.log" if node in (None, "slurm") else f"*-{node}.log")
    return max((path for path in others if path.is_file()), key=_modified, default=None)


def last_lines(log: Path, lines: int) -> list[str]:
    """Return the last non-empty lines of a file."""
    with log.open("rb") as file:  # of which the end suffices: a log may have gigabytes
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read(TAIL).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def first_line(text: str) -> str:
    """Return the first line of a message."""
    return text.splitlines()[0] if text else ""


def requester(trigger: Path) -> str:
    """Return the first line of a trigger file, which contains who made the request, and why."""
    try:
        name = first_line(read_small(trigger).decode(errors="replace"))
    except (OSError, ValueError):
        name = ""
    return name or f"control/{trigger.name}"


def job_argv(job: JobDir) -> list[str]:
    """Return the arguments of dtt with which a job runs."""
    # Without a submission, it was only trained without Slurm.
    submission = job.submission_record() or {"argv": ["train", str(job.root)]}
    return [str(argument) for argument in submission["argv"]] or ["train", str(job.root)]


def _is_fresh(beat: dict[str, Any], now: float) -> bool:
    """Return True if a heartbeat is recent and its process, if on this node, still exists."""
    if now - beat["time"] > SILENT_SECONDS:
        return False
    # On another node the pid means another process.
    return beat["node"] != socket.gethostname() or psutil.pid_exists(beat["pid"])


def tail(path: Path, fields: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    """Yield the records with these fields at the end of a JSON-lines file."""
    return read_records(path, fields, last=TAIL)


def _modified(path: Path) -> float:
    """Return the Unix time at which a file was last modified; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
