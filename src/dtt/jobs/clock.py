"""Clock of a job: the time used by all its attempts, and the time left until its limit.

clock.json of an attempt is rewritten every 5 seconds, or twice a second with a time budget:
    began               start time of the process of rank 0, in seconds since 1970
    seconds             duration of the attempt so far
    first               the step after which the attempt started
    step, steps         the current step, and the number of steps that the attempt ran
    parts               seconds of each part of the time breakdown
The last four exist after the first log line, or at the end.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from dtt.artifacts.jobdir import JobDir
from dtt.base.reading import Kind, read_record
from dtt.config.value_types import seconds
from dtt.jobs.phase_timer import process_age

INTERVAL = 5.0
"""Seconds between writes of `clock.json`: the time lost from the count if an attempt is killed."""
TIMED_INTERVAL = 0.5
"""Seconds between writes where a time limit ends the run."""


KEPT: dict[str, Kind] = {"began": float, "seconds": float}
"""Fields that every clock.json has, and their types."""


YEAR = 8766
"""Hours of a year."""
MOST = 1e12
"""Maximum number of seconds that `in_words` shows; a longer time comes from a damaged file."""


class Clock:
    """Clock of the attempts of a job; rank 0 of each attempt writes its time to `clock.json`.

    A thread writes it periodically, so that an attempt that is killed is counted, too, whatever it
    was doing.
    """

    def __init__(self, job: JobDir, attempt: int, *, timed: bool = False) -> None:
        """Start the clock of an attempt, which counts from the start of this process.

        With `timed`, a time limit ends the run, and the clock is written more often.
        """
        self._path = job.clock(attempt)
        self._interval = TIMED_INTERVAL if timed else INTERVAL
        self._fields: dict[str, Any] = {}
        self._began = psutil.Process().create_time()
        # Elapsed time must not change when the wall clock is set.
        self._start = time.monotonic() - process_age()
        earlier = records(job, (number for number in job.attempts() if number < attempt))
        self._before: float = sum(record["seconds"] for record in earlier)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def ran(self) -> float:
        """Return the seconds since this attempt started."""
        return time.monotonic() - self._start

    def left(self, budget: str) -> float:
        """Return the seconds of `train.budget` that all attempts have left, negative after it."""
        return seconds(budget) - self._before - self.ran()

    def set_fields(self, **facts: Any) -> None:
        """Set the fields written along with the time: the breakdown that `goodput` reads."""
        self._fields = facts

    def close(self) -> None:
        """Write the time once more, and stop."""
        self._over.set()
        self._thread.join(timeout=5.0)  # a file system that hangs must not block the exit

    def _run(self) -> None:
        over = False
        while True:
            with contextlib.suppress(OSError):  # a full disk is for the checkpoints to report
                self._keep()
            if over:
                return
            over = self._over.wait(self._interval)

    def _keep(self) -> None:
        """Write `clock.json`, without fsync, like the heartbeat."""
        record = {"began": self._began, "seconds": round(self.ran(), 3), **self._fields}
        aside = self._path.with_name(".clock.json.tmp")
        aside.write_text(json.dumps(record) + "\n")
        aside.replace(self._path)


def in_words(duration: float) -> str:
    """Return a duration in words, such as `1 h 20 min`, `3 min 5 s`, `5 d 3 h` or `2.4 years`."""
    hours, rest = divmod(
        round(min(max(0.0, duration), MOST)), 3600
    )  # below 0: the clock was set back
    if hours >= 2 * YEAR:
        return f"{hours / YEAR:,.1f} years"
    if hours >= 100:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def records(job: JobDir, attempts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the `clock.json` of each of these attempts that has a valid one."""
    for path in map(job.clock, attempts):
        record = read_record(path, KEPT)  # None if a power failure cut it off: no time is counted
        if record is not None:
            yield record | {"seconds": max(0.0, record["seconds"])}
