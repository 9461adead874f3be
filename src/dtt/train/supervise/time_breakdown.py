"""Time breakdown of an attempt, from the start of the process on."""

from __future__ import annotations

from collections import defaultdict

from dtt.base.log import log
from dtt.jobs.clock import Clock
from dtt.jobs.phase_timer import PhaseTimer
from dtt.track.base import Record
from dtt.train.throughput import ThroughputMeter


class TimeBreakdown:
    """Sums of the time spent in the start and in each part of the steps.

    The clock writes them to `clock.json`, from which `goodput` reads them.
    """

    def __init__(self, start: PhaseTimer, clock: Clock | None) -> None:
        """Create the breakdown; `clock` is that of rank 0, and None on other ranks."""
        self._start, self._clock = start, clock
        self._first: int | None = None
        self._logged = False
        self._compiling = 0.0

    def start(self, step: int, meter: ThroughputMeter) -> None:
        """Note that training starts after step `step`."""
        meter.restart()
        self._first = step
        meter.totals.clear()  # the timer of the startup has counted this time

    def startup_record(self, meter: ThroughputMeter) -> Record | None:
        """Return the `start` record on the first call, None after that; log its phases.

        Call it before the first `ThroughputMeter.read`.
        """
        if self._logged:
            return None
        self._logged = True
        first_step, self._compiling = meter.first_step()
        phases = {**self._start.seconds, "first step": first_step}
        times = ", ".join(f"{phase} {took:.1f}" for phase, took in phases.items() if took >= 0.05)
        log.info("the first step was done after %.1f s: %s", sum(phases.values()), times)
        return {
            "kind": "start",
            "step": self._first,
            "seconds": {phase: round(seconds, 4) for phase, seconds in phases.items()},
            "matmul_flops": meter.matmul,
        }

    def finish(self, step: int, meter: ThroughputMeter) -> None:
        """Write the final breakdown, including the time since the last reading of `meter`."""
        meter.restart()
        self.write(step, meter)

    def write(self, step: int, meter: ThroughputMeter) -> None:
        """Write the breakdown of the attempt up to `step`, from the totals of `meter`."""
        # Ranks wait for each other, so one clock stands for all.
        if self._clock is None:
            return
        parts: defaultdict[str, float] = defaultdict(float, meter.totals)
        # The first step compiles: its excess over a usual step counts as part of the start. Moved,
        # not added: the sum of all parts stays the time of the attempt. Not more than there is: on
        # a GPU, part of the excess is the optimizer's, whose kernels are loaded at its first step.
        compiling = min(self._compiling, parts["forward_backward"])
        parts["start"] = sum(self._start.seconds.values()) + compiling
        parts["forward_backward"] -= compiling
        rounded = {part: round(seconds, 3) for part, seconds in parts.items()}
        self._clock.set_fields(first=self._first, step=step, steps=meter.steps, parts=rounded)
