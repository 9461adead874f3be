"""The attempts of a job: when each ran, how it ended, and where the time went."""

from __future__ import annotations

from typing import Any

from dtt.base.errors import ExitCode
from dtt.base.reading import is_kind, read_record
from dtt.jobs.clock import KEPT
from dtt.jobs.goodput import goodput
from dtt.jobs.job_files import first_line
from dtt.jobs.job_state import Status

MAX_ATTEMPTS = 2000
"""Number of attempts that a page lists, the newest."""
ENDINGS = {ExitCode.DONE: "done", ExitCode.PREEMPTED: "stopped", ExitCode.DIVERGED: "diverged"}


def of_job(status: Status) -> dict[str, Any]:
    """Return the goodput of a job, and its attempts in order."""
    job = status.job
    useful = goodput(job)
    return {
        "goodput": None if useful is None else useful.record() | {"useful": useful.useful},
        "attempts": [_attempt(status, number) for number in job.attempts()[-MAX_ATTEMPTS:]],
    }


def _attempt(status: Status, number: int) -> dict[str, Any]:
    job = status.job
    clock = read_record(job.clock(number), KEPT) or {}
    ending = job.exit_record(number)
    running = status.alive and number == status.files.attempt
    if ending is not None:
        how = ENDINGS.get(ending["code"], "failed")
    else:
        how = "running" if running else "killed"
    steps = {name: clock.get(name) if is_kind(clock.get(name), int) else None
             for name in ("first", "step")}  # fmt: skip
    return {
        "number": number,
        "began": clock.get("began"),
        "seconds": clock.get("seconds"),
        **steps,
        "how": how,
        "code": ending and ending["code"],
        "reason": first_line(ending["reason"]) if ending else "",
        "node": ending and ending["node"],
        "asked_by": (ending or {}).get("asked_by", ""),
    }
