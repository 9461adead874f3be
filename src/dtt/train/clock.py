"""How long a job has run, over all its attempts, and when it must have ended."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import psutil

from dtt.config import budget
from dtt.config.train import TrainConfig
from dtt.runtime.jobdir import JobDir

INTERVAL = 0.5
"""Seconds that an attempt which is killed may have run longer than it is counted for."""


class Clock:
    """How long the attempts of a job have run, as kept beside each of them by its first rank.

    A thread keeps it, so that an attempt that is killed is counted, too, whatever it was doing.
    """

    def __init__(self, job: JobDir, attempt: int) -> None:
        """It began with this process."""
        self._path = job.clock(attempt)
        self.began = psutil.Process().create_time()
        earlier = [json.loads(job.clock(n).read_bytes()) for n in _kept(job, attempt)]
        self._before: float = sum(record["seconds"] for record in earlier)
        self.first_began = min([self.began, *(record["began"] for record in earlier)])
        """When the first attempt began that had a clock (unix)."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def deadline(self, train: TrainConfig) -> float:
        """When this attempt must have ended (unix); of two limits the first."""
        limits = []
        if train.budget is not None:
            limits.append(self.began + budget.seconds(train.budget) - self._before)
        if train.finish_by is not None:
            limits.append(budget.moment(train.finish_by, self.first_began))
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
        record = {"began": self.began, "seconds": round(time.time() - self.began, 3)}
        aside = self._path.with_name(".clock.json.tmp")
        aside.write_text(json.dumps(record) + "\n")
        aside.replace(self._path)


def _kept(job: JobDir, attempt: int) -> list[int]:
    return [number for number in range(1, attempt) if job.clock(number).exists()]
