"""Clock of a job: the time used by all its attempts, and the time left until its limit.

clock.json of an attempt is rewritten every 5 seconds:
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
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtt.artifacts.jobdir import JobDir
from dtt.base.reading import Kind, fits, is_kind, read_record
from dtt.config.value_types import seconds

INTERVAL = 5.0
"""Seconds between writes of `clock.json`: the time lost from the count if an attempt is killed."""
KEPT: dict[str, Kind] = {"began": float, "seconds": float}
"""Fields that every clock.json has, and their types."""
LOGGED: dict[str, Kind] = {"steps": int, "step": int, "first": int, "parts": dict}
"""Fields in the clock.json of an attempt that reached a log line, and their types."""
USEFUL = ("forward_backward", "optimizer")
LEAST_SHOWN = 0.005
"""Minimum share of a loss that `Goodput.describe` mentions."""
YEAR = 8766
"""Hours of a year."""
MOST = 1e12
"""Maximum number of seconds that `in_words` shows; a longer time comes from a damaged file."""


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


class Clock:
    """Clock of the attempts of a job; rank 0 of each attempt writes its time to `clock.json`.

    A thread writes it periodically, so that an attempt that is killed is counted, too, whatever it
    was doing.
    """

    def __init__(self, job: JobDir, attempt: int) -> None:
        """Start the clock of an attempt, which counts from the start of this process."""
        self._path = job.clock(attempt)
        self.fields: dict[str, Any] = {}
        """The fields written along with the time: the breakdown that `goodput` reads."""
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

    def close(self) -> None:
        """Write the time once more, and stop."""
        self._over.set()
        self._thread.join(timeout=5.0)  # a file system that hangs must not block the exit

    def _run(self) -> None:
        """Write `clock.json`, without fsync, like the heartbeat, until the clock is closed."""
        aside, over = self._path.with_name(".clock.json.tmp"), False
        while True:
            record = {"began": self._began, "seconds": round(self.ran(), 3), **self.fields}
            with contextlib.suppress(OSError):  # a full disk is for the checkpoints to report
                aside.write_text(json.dumps(record) + "\n")
                aside.replace(self._path)
            if over:
                return
            over = self._over.wait(INTERVAL)


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


@dataclass(frozen=True)
class Goodput:
    """Useful and lost time of a job, in seconds, as measured by rank 0."""

    attempts: int
    seconds: float
    """Time of all attempts; the waiting time between them does not count."""
    useful: float
    """Forward and backward passes and optimizer, in steps that no later attempt repeated."""
    lost: Mapping[str, float]
    """The rest by cause: start, redone (steps that were repeated), data (waiting for it), save, …;
    unlogged is the time after the last log line of an attempt that still runs or was killed."""

    @property
    def share(self) -> float:
        """Useful time as a fraction of the total, 0 to 1."""
        return min(1.0, self.useful / self.seconds)

    def describe(self) -> str:
        """Return a one-line summary."""
        lost = sorted(self.lost.items(), key=lambda item: -item[1])
        shares = [(name, seconds / self.seconds) for name, seconds in lost]
        causes = ", ".join(f"{name} {share:.1%}" for name, share in shares if share > LEAST_SHOWN)
        plural = "s" if self.attempts > 1 else ""
        total = f"{in_words(self.seconds)} in {self.attempts} attempt{plural}"
        return f"{self.share:.1%} of {total}" + (f"; lost: {causes}" if causes else "")

    def record(self) -> dict[str, Any]:
        """Return the JSON object: `share`, `seconds` and `lost`."""
        lost = {name: round(seconds, 3) for name, seconds in self.lost.items()}
        return {"share": round(self.share, 4), "seconds": round(self.seconds, 3), "lost": lost}


def goodput(job: JobDir) -> Goodput | None:
    """Return the goodput of all attempts so far, from their clock.json; None if there is none."""
    attempts = list(records(job, job.attempts()))
    seconds = sum(attempt["seconds"] for attempt in attempts)
    if not seconds:
        return None
    useful, lost = 0.0, defaultdict[str, float](float)
    # The step from which a later attempt resumed: steps after it are lost.
    resumed_from = float("inf")
    # Backwards: the newest attempt lost nothing, and each earlier one loses what a later one
    # repeated.
    for attempt in reversed(attempts):
        steps = attempt.get("steps")
        if not steps or not fits(attempt, LOGGED):  # it ended before its first log line
            lost["start"] += attempt["seconds"]
            continue
        # Steps up to the resume, of all steps of the attempt. Times are per part, not per step, so
        # the share stands for both.
        kept_share = max(0.0, min(attempt["step"], resumed_from) - attempt["first"]) / steps
        resumed_from = min(resumed_from, attempt["first"])
        # Negative or wrong values come from a damaged file, and must not raise the share.
        spent = {part: max(0.0, s) for part, s in attempt["parts"].items() if is_kind(s, float)}
        working = sum(spent.pop(part, 0.0) for part in USEFUL)
        useful += kept_share * working
        lost["redone"] += (1 - kept_share) * working
        for part, part_seconds in spent.items():
            lost[part] += part_seconds
        lost["unlogged"] += max(0.0, attempt["seconds"] - working - sum(spent.values()))
    return Goodput(len(attempts), seconds, useful, lost)
