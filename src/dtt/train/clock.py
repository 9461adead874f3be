"""How long a job has run, over all its attempts, and how long it still may."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from dtt.config import budget
from dtt.config.train import TrainConfig
from dtt.errors import ConfigError
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log

INTERVAL = 0.5
"""Seconds that an attempt which is killed may have run longer than it is counted for."""


class Clock:
    """How long the attempts of a job have run, as kept beside each of them by its first rank.

    A thread keeps it, so that an attempt that is killed is counted, too, whatever it was doing.
    """

    def __init__(self, job: JobDir, attempt: int) -> None:
        """It began with this process."""
        self._path = job.clock(attempt)
        self._began = psutil.Process().create_time()
        # What was measured must not change when somebody sets the clock on the wall.
        self._start = time.monotonic() - (time.time() - self._began)
        earlier = list(_earlier(job, attempt))
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

    def close(self) -> None:
        """Keep the time for the last time."""
        self._over.set()
        self._thread.join(timeout=1.0)  # a file system that hangs must not hold us

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(INTERVAL)
            with contextlib.suppress(OSError):  # a full disk is for the checkpoints to report
                self._keep()

    def _keep(self) -> None:
        """Not flushed to the disk, as with the heartbeat."""
        record = {"began": self._began, "seconds": round(self.ran(), 3)}
        aside = self._path.with_name(".clock.json.tmp")
        aside.write_text(json.dumps(record) + "\n")
        aside.replace(self._path)


def _earlier(job: JobDir, attempt: int) -> Iterator[dict[str, Any]]:
    """The records of the attempts before this one that had a clock."""
    for path in map(job.clock, range(1, attempt)):
        with contextlib.suppress(FileNotFoundError):
            try:
                yield json.loads(path.read_bytes())
            except ValueError:  # cut off by a power failure
                log.warning("%s cannot be read: its attempt counts as no time", path)
