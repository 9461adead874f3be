"""What a job's own files say about it: facts, no verdict."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtt.errors import ExitCode
from dtt.reading import Kind, is_kind, read_record, read_records, read_small, read_text
from dtt.runtime.jobdir import ANSWER, HEARTBEAT, TAIL, JobDir

SILENT_SECONDS = 60
"""A heartbeat is rewritten every few seconds; one so old says that nobody is there."""
SUBMISSION: Mapping[str, Kind] = {"time": float, "job_id": (str, int, type(None))}
"""Fields of a record in submissions.jsonl; no `job_id` if sbatch did not answer."""
SUBMISSIONS = 3
"""So many of a job's newest submissions may matter: a chain has one running and one queued."""


@dataclass(frozen=True)
class Evidence:
    """One look at a job's files. Times are unix seconds, 0 for what has not happened."""

    job: JobDir
    ran_as: str | None
    """Slurm's id of the newest attempt; None outside Slurm, and until the attempt notes it."""
    submitted: float
    unanswered: bool
    """True if sbatch did not answer the newest submission and no attempt has started since."""
    successors: frozenset[str]
    """Slurm's ids of the submissions that the job script itself made."""
    decision: str
    """Decision of the job script after the newest attempt, `again: …` or `over: …`; else empty."""
    attempt: int
    """Number of the newest; 0 before the first."""
    began: float
    """When the newest attempt did."""
    ending: dict[str, Any] | None
    """exit.json of the newest attempt."""
    ended: float
    heartbeat: dict[str, Any] | None
    """The newest attempt's."""
    steps: int | None
    """Of the whole run, as any attempt has told."""
    acknowledged: dict[str, Any] | None
    """The newest attempt's last answer to a request."""
    beats: bool
    """Whether a process says that it is there."""
    now: float

    @classmethod
    def take(cls, job: JobDir) -> Evidence:
        """Look."""
        number, now = job.attempt(), time.time()
        folder = job.attempt_dir(number)
        began = _began(job)
        ending = job.exit_record(number) if number else None
        beat = read_record(job.heartbeat, HEARTBEAT)
        answered = read_record(job.acknowledged, ANSWER)
        own_beat = beat if beat is not None and beat["attempt"] == number else None
        submissions = list(tail(job.submissions, SUBMISSION))
        submitted = submissions[-1]["time"] if submissions else 0.0
        return cls(
            job=job,
            ran_as=_ran_as(job),
            submitted=submitted,
            unanswered=bool(submissions)
            and submissions[-1]["job_id"] is None
            and submitted > began,
            successors=frozenset(str(r["job_id"]) for r in submissions if "argv" not in r),
            decision=_decision(job) if _modified(job.decision) > max(began, submitted) else "",
            attempt=number,
            began=began,
            ending=ending,
            ended=_modified(folder / "exit.json"),
            heartbeat=own_beat,
            steps=beat["steps"] if beat is not None else None,
            acknowledged=answered if answered and answered["time"] >= began else None,
            beats=own_beat is not None and ending is None and _is_fresh(own_beat, now),
            now=now,
        )

    @property
    def silence(self) -> float:
        """Seconds since the newest attempt gave a sign of life."""
        return self.now - max(self.began, self.heartbeat["time"] if self.heartbeat else 0.0)

    @property
    def saved(self) -> bool:
        """Whether the newest attempt ended on request, with all of its work saved."""
        return self.ending is not None and self.ending["code"] == ExitCode.PREEMPTED

    @property
    def reason(self) -> str:
        """Why the newest attempt ended, in a line."""
        return first_line(self.ending["reason"]) if self.ending else "nothing was said at its end"

    @property
    def asked_by(self) -> str:
        """Who asked the newest attempt to stop, as it said in the end; empty if it did not."""
        if self.ending and "asked_by" in self.ending:
            return str(self.ending["asked_by"])
        lines = str(self.ending["reason"]).splitlines() if self.ending else []
        return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("  why:")), "")

    @property
    def step(self) -> int | None:
        """The last that is known to be done."""
        beat = self.heartbeat["step"] if self.heartbeat else None
        return max((s for s in (self.job.last_step(), beat) if s is not None), default=None)

    @property
    def over(self) -> bool:
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
            "tokens_per_second": number("perf", "tokens_per_second") if self.beats else None,
            "eval_loss": number("eval", "loss"),
        }

    def stalled(self) -> int:
        """How many attempts in a row began with the checkpoint that is still the newest."""
        try:
            began_with, count = map(int, (read_text(self.job.root / "stalled") or "").split())
        except ValueError:  # never submitted
            return 0
        newest = self.job.newest_checkpoint_name() or "step--1"
        return count if int(newest.removeprefix("step-")) == began_with else 0

    def log_tail(self, lines: int) -> list[str]:
        """The last lines that say anything in the log that tells most about the ending."""
        log = newest_log(self.job) if self.attempt else newest_log(self.job, "slurm")
        return last_lines(log, lines) if log else []


def newest_log(job: JobDir, node: str | None = None) -> Path | None:
    """The newest attempt's log, of its first node or of `node`; "slurm": the job script's own.

    None if there is none. Without Slurm the newest file counts.
    """
    latest = job.logs / (f"latest-{node}.log" if node else "latest.log")
    if latest.is_file():
        return latest
    others = job.logs.glob("*.log" if node in (None, "slurm") else f"*-{node}.log")
    return max((path for path in others if path.is_file()), key=_modified, default=None)


def last_lines(log: Path, lines: int) -> list[str]:
    """The last lines of a file that are not empty."""
    with log.open(encoding="utf-8", errors="replace") as file:
        return list(deque((line.rstrip() for line in file if line.strip()), maxlen=lines))


def first_line(text: str) -> str:
    """The first line of a message."""
    return text.splitlines()[0] if text else ""


def requester(trigger: Path) -> str:
    """The first line of a trigger file: who asks, and why."""
    try:
        said = first_line(read_small(trigger).decode(errors="replace"))
    except (OSError, ValueError):
        said = ""
    return said or f"control/{trigger.name}"


def slurm_ids(job: JobDir) -> list[str]:
    """What Slurm called the last submissions of a job, the newest last."""
    known = tail(job.submissions, SUBMISSION)
    ids = [str(r["job_id"]) for r in known if r["job_id"] is not None][-SUBMISSIONS:]
    ran_as = _ran_as(job)
    # One that was handed over by plain sbatch is known from its attempt only.
    return ids if ran_as is None or ran_as in ids else [*ids, ran_as]


def _ran_as(job: JobDir) -> str | None:
    """Slurm's id of the newest attempt, which writes env.json when it starts."""
    path, began = job.root / "env.json", _began(job)
    record = read_record(path, {"environment": dict})
    if record is None or not began or _modified(path) < began:
        return None
    env = {name: value for name, value in record["environment"].items() if isinstance(value, str)}
    if {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= env.keys():
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def _decision(job: JobDir) -> str:
    try:
        return first_line(job.decision.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _began(job: JobDir) -> float:
    """When the newest attempt began (unix); 0 before the first."""
    number = job.attempt()
    folder = job.attempt_dir(number)
    return (_modified(folder / "ranks/00000.json") or _modified(folder)) if number else 0.0


def _is_fresh(beat: dict[str, Any], now: float) -> bool:
    """Whether a heartbeat tells of a process that is there."""
    if now - beat["time"] > SILENT_SECONDS:
        return False
    return beat["node"] != socket.gethostname() or psutil.pid_exists(beat["pid"])


def tail(path: Path, fields: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    """The records with these fields at the end of a JSON-lines file."""
    return read_records(path, fields, last=TAIL)


def _modified(path: Path) -> float:
    """When a file was last changed (unix); 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
