"""How long a job has run, over all its attempts, and how long it still may."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from dtt.config import budget
from dtt.config.train import TrainConfig
from dtt.errors import ConfigError
from dtt.reading import Kind, read_record
from dtt.runtime.jobdir import JobDir
from dtt.runtime.laps import process_age

INTERVAL = 5.0
"""Seconds that an attempt which is killed may have run longer than it is counted for …"""
TIMED_INTERVAL = 0.5
"""… where the clock ends the run."""


KEPT: dict[str, Kind] = {"began": float, "seconds": float}
"""Fields that every clock.json has."""


MOST = 1e12
"""Seconds that are shown: what is longer was never measured."""


class Clock:
    """How long the attempts of a job have run, as kept beside each of them by its first rank.

    A thread keeps it, so that an attempt that is killed is counted, too, whatever it was doing.
    """

    def __init__(self, job: JobDir, attempt: int, *, timed: bool = False) -> None:
        """It began with this process; `timed`: keep the time often."""
        self._path = job.clock(attempt)
        self._interval = TIMED_INTERVAL if timed else INTERVAL
        self._facts: dict[str, Any] = {}
        self._began = psutil.Process().create_time()
        # What was measured must not change when somebody sets the clock on the wall.
        self._start = time.monotonic() - process_age()
        earlier = list(records(job, range(1, attempt)))
        self._before: float = sum(record["seconds"] for record in earlier)
        self._first_began = min([self._began, *(record["began"] for record in earlier)])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def ran(self) -> float:
        """Seconds since this attempt began."""
        return time.monotonic() - self._start

    def left(self, train: TrainConfig) -> float:
        """Seconds until this attempt must have ended, below 0 after that; of two limits the first.

        ConfigError if that time was over before the job was first started.
        """
        limits = []
        if train.budget is not None:
            limits.append(budget.seconds(train.budget) - self._before - self.ran())
        if train.finish_by is not None:
            end = budget.moment(train.finish_by, self._first_began)
            if end <= self._first_began:
                raise ConfigError(
                    f"train.finish_by={train.finish_by} was over before the job was started",
                    next="a time to come, as 07:00, which is the next one",
                )
            limits.append(end - time.time())
        return min(limits)

    def tell(self, **facts: Any) -> None:
        """Keep these beside the time from now on: what it was spent on, as `goodput` reads it."""
        self._facts = facts

    def close(self) -> None:
        """Keep the time for the last time."""
        self._over.set()
        self._thread.join(timeout=1.0)  # a file system that hangs must not hold us

    def _run(self) -> None:
        over = False
        while True:
            with contextlib.suppress(OSError):  # a full disk is for the checkpoints to report
                self._keep()
            if over:
                return
            over = self._over.wait(self._interval)

    def _keep(self) -> None:
        """Not flushed to the disk, as with the heartbeat."""
        record = {"began": self._began, "seconds": round(self.ran(), 3), **self._facts}
        aside = self._path.with_name(".clock.json.tmp")
        aside.write_text(json.dumps(record) + "\n")
        aside.replace(self._path)


def in_words(seconds: float) -> str:
    """As `1 h 20 min` or `3 min 5 s`."""
    hours, rest = divmod(
        round(min(max(0.0, seconds), MOST)), 3600
    )  # below 0: the clock was set back
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def records(job: JobDir, attempts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What was kept of these attempts, as far as there is anything."""
    for path in map(job.clock, attempts):
        record = read_record(path, KEPT)  # None, and no time, if a power failure cut it off
        if record is not None:
            yield record | {"seconds": max(0.0, record["seconds"])}
