"""Seconds of a start, phase by phase."""

from __future__ import annotations

import time
from collections import defaultdict

import psutil


class Laps:
    """A stopwatch that began with this process."""

    def __init__(self) -> None:
        """The interpreter's own start counts, too."""
        self._last = time.perf_counter() - (time.time() - psutil.Process().create_time())
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Of each phase, in the order of the first lap of each."""

    def lap(self, phase: str) -> None:
        """What was done since the last lap belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
