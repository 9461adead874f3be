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

from dtt.artifacts.jobdir import ANSWER, HEARTBEAT, TAIL, JobDir, slurm_id
from dtt.base.errors import ExitCode
from dtt.base.reading import Kind, fits, is_kind, read_record, read_records, read_small, read_text

SILENT_SECONDS = 60
"""Age in seconds above which a heartbeat is stale; a live process rewrites it every few seconds."""
SUBMISSION: Mapping[str, Kind] = {"time": float, "job_id": (str, int, type(None))}
"""Fields of a record in submissions.jsonl. `job_id` is None if sbatch did not answer."""
GAVE_UP = re.compile(r"over: .*?\b([0-9]{1,9}) consecutive attempts\b")
"""The decision of a job script that has used all attempts allowed without a new checkpoint."""
SUBMISSIONS = 3
"""Number of newest submissions of a job to query in Slurm: a chain has one running and one
queued."""


@dataclass(frozen=True)
class JobFiles:
    """A snapshot of a job's files. Times are Unix seconds, 0 for events that have not happened."""

    job: JobDir
    slurm_id: str | None
    """Slurm's id of the newest attempt; None outside Slurm, and until the attempt has recorded
    it."""
    submitted: float
    unanswered: bool
    """True if sbatch did not answer the newest submission and no attempt has started since."""
    unsent: bool
    """True if `dtt submit --no-submit` wrote the newest submission, for a later sbatch."""
    successors: frozenset[str]
    """Slurm's ids of the submissions that the job script itself made."""
    decision: str
    """Decision of the job script after the newest attempt, `again: …` or `over: …`; else empty."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    started: float
    """Start time of the newest attempt."""
    ending: dict[str, Any] | None
    """Content of exit.json of the newest attempt; None if there is none."""
    ended: float
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
        folder = job.attempt_dir(number)
        slurm, started = _start(job)
        ending = job.exit_record(number) if number else None
        beat = read_record(job.heartbeat, HEARTBEAT)
        answered = read_record(job.acknowledged, ANSWER)
        # The heartbeat file outlives an attempt, and a new one may not have written its own yet.
        latest_heartbeat = beat if beat is not None and beat["attempt"] == number else None
        submissions = list(tail(job.submissions, SUBMISSION))
        submitted = submissions[-1]["time"] if submissions else 0.0
        return cls(
            job=job,
            slurm_id=slurm,
            submitted=submitted,
            unanswered=bool(submissions)
            and submissions[-1]["job_id"] is None
            and submissions[-1].get("sent") is not False
            and submitted > started,
            unsent=bool(submissions) and submissions[-1].get("sent") is False,
            successors=frozenset(str(r["job_id"]) for r in submissions if "argv" not in r),
            decision=_decision(job, since=max(started, submitted)),
            attempt=number,
            started=started,
            ending=ending,
            ended=_end_time(ending, folder / "exit.json"),
            heartbeat=latest_heartbeat,
            steps=beat["steps"] if beat is not None else None,
            # The same for an acknowledgement.
            acknowledged=answered if answered and answered["time"] >= started else None,
            alive=latest_heartbeat is not None
            and ending is None
            # A fresh heartbeat is not enough: the process may have written exit.json since.
            and _is_fresh(latest_heartbeat, now),
            now=now,
        )

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
        if self.ending and "asked_by" in self.ending:
            return str(self.ending["asked_by"])
        lines = str(self.ending["reason"]).splitlines() if self.ending else []
        return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("  why:")), "")

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
        return last_command(self.job)[0][0] == "train"

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


def last_command(job: JobDir) -> tuple[list[str], Path | None]:
    """Return arguments and working directory of the newest submission that recorded them."""
    # Successors, which the job script records, have no `argv`.
    known = tail(job.submissions, SUBMISSION)
    started = [record for record in known if fits(record, {"argv": list, "directory": str})]
    if not started:  # never submitted: only trained without Slurm
        return ["train", str(job.root)], None
    return [str(argument) for argument in started[-1]["argv"]], Path(started[-1]["directory"])


def slurm_ids(job: JobDir) -> list[str]:
    """Return Slurm's ids of the last submissions of a job, the newest last."""
    known = tail(job.submissions, SUBMISSION)
    ids = [str(r["job_id"]) for r in known if r["job_id"] is not None][-SUBMISSIONS:]
    newest, _ = _start(job)
    # A job submitted with plain sbatch has no record in submissions.jsonl, only its attempt.
    return ids if newest is None or newest in ids else [*ids, newest]


def _start(job: JobDir) -> tuple[str | None, float]:
    """Return Slurm's id and the start time of the newest attempt; None and 0 before the first.

    The id is None outside Slurm, and in an allocation for work by hand.
    """
    number = job.attempt()
    if not number:
        return None, 0.0
    if (record := job.attempt_record(number)) is not None:
        return record["slurm"], record["started"]
    # Older versions wrote no attempt.json.
    folder = job.attempt_dir(number)
    # Written by rank 0 at its start. The time of the folder changes with each file in it.
    started = _modified(folder / "ranks/00000.json") or _modified(folder)
    path = job.root / "env.json"  # of the newest attempt, unless it is older than that
    record = read_record(path, {"environment": dict})
    if record is None or _modified(path) < started or record.get("batch") is False:
        return None, started
    return slurm_id(record["environment"]), started


def _end_time(ending: dict[str, Any] | None, path: Path) -> float:
    """Return the time of an exit record, which older versions did not write into the file."""
    if ending is not None and is_kind(ending.get("time"), float):
        return float(ending["time"])
    return _modified(path)


def _decision(job: JobDir, since: float) -> str:
    """Return the job script's decision; empty if it concerns an attempt before `since`."""
    decision, _, when = (read_text(job.decision) or "").partition("\n")
    try:
        made = float(when)
    except ValueError:  # older versions wrote no time
        made = _modified(job.decision)
    return decision if made > since else ""


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
