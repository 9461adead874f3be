"""Seconds of a start, phase by phase."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import psutil


def process_age() -> float:
    """Return the seconds since this process was started, whatever happened to the wall clock."""
    try:  # both count from boot
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError):  # not Linux
        return max(0.0, time.time() - psutil.Process().create_time())


class Laps:
    """A stopwatch that began with this process."""

    def __init__(self) -> None:
        """The interpreter's own start counts, too."""
        self._last = time.perf_counter() - process_age()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Of each phase, in the order of the first lap of each."""

    def lap(self, phase: str) -> None:
        """What was done since the last lap belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
