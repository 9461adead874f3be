"""A timer for the phases of the startup."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import psutil


def process_age() -> float:
    """Return the seconds since this process started, unaffected by changes of the wall clock."""
    try:  # both clocks count from boot
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError):  # not Linux
        return max(0.0, time.time() - psutil.Process().create_time())


class PhaseTimer:
    """A phase timer that starts with the process."""

    def __init__(self) -> None:
        """Start the timer at the start of the process, to include the interpreter's startup."""
        self._last = time.perf_counter() - process_age()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of each phase, in the order of first use."""

    def end_phase(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
