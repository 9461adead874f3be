"""What a job's own files say about it: facts, no verdict."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtt.errors import ExitCode
from dtt.runtime.jobdir import JobDir

SILENT_SECONDS = 60
"""A heartbeat is rewritten every few seconds; one so old says that nobody is there."""
SUBMISSIONS = 3
"""So many of a job's newest submissions may matter: a chain has one running and one queued."""
TAIL = 2**16
"""Bytes at the end of metrics.jsonl that are looked at."""


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
        beat, answered = _read(job.heartbeat), _read(job.acknowledged)
        own_beat = beat if beat is not None and beat["attempt"] == number else None
        submissions = list(tail(job.submissions))
        submitted = submissions[-1]["time"] if submissions else 0.0
        return cls(
            job=job,
            ran_as=_ran_as(job),
            submitted=submitted,
            unanswered=bool(submissions)
            and submissions[-1]["job_id"] is None
            and submitted > began,
            successors=frozenset(r["job_id"] for r in submissions if "argv" not in r),
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
        newest = {record["kind"]: record for record in tail(self.job.metrics)}
        train, perf, evaluated = (newest.get(kind, {}) for kind in ("train", "perf", "eval"))
        return {
            "loss": train.get("loss"),
            "tokens": train.get("tokens"),
            "tokens_per_second": perf.get("tokens_per_second") if self.beats else None,
            "eval_loss": evaluated.get("loss"),
        }

    def stalled(self) -> int:
        """How many attempts in a row began with the checkpoint that is still the newest."""
        try:
            began_with, count = map(int, (self.job.root / "stalled").read_text().split())
        except (OSError, ValueError):  # never submitted
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
    if latest.exists():
        return latest
    others = job.logs.glob("*.log" if node in (None, "slurm") else f"*-{node}.log")
    return max((path for path in others if path.exists()), key=_modified, default=None)


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
        said = first_line(trigger.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        said = ""
    return said or f"control/{trigger.name}"


def slurm_ids(job: JobDir) -> list[str]:
    """What Slurm called the last submissions of a job, the newest last."""
    told = [record["job_id"] for record in tail(job.submissions)]
    ids = [id for id in told if id is not None][-SUBMISSIONS:]
    ran_as = _ran_as(job)
    # One that was handed over by plain sbatch is known from its attempt only.
    return ids if ran_as is None or ran_as in ids else [*ids, ran_as]


def _ran_as(job: JobDir) -> str | None:
    """Slurm's id of the newest attempt, which writes env.json when it starts."""
    path, began = job.root / "env.json", _began(job)
    record = _read(path)
    if record is None or not began or _modified(path) < began:
        return None
    env: dict[str, str] = record["environment"]
    if "SLURM_ARRAY_JOB_ID" in env:
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


def _read(path: Path) -> dict[str, Any] | None:
    """A small JSON file; None if it is not there."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return record


def tail(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines at the end of a JSON-lines file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if path.stat().st_size > TAIL:
            file.seek(-TAIL, 2)
            file.readline()  # the rest of a line that began before
        for line in file:
            if line.startswith(b"{") and line.endswith(b"}\n"):
                yield json.loads(line)


def _modified(path: Path) -> float:
    """When a file was last changed (unix); 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
