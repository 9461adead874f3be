"""What the time of an attempt went into, from the command on."""

from __future__ import annotations

from collections import defaultdict

from dtt.runtime.laps import Laps
from dtt.runtime.log import log
from dtt.track.base import Record
from dtt.train.clock import Clock
from dtt.train.meter import Meter


class Account:
    """Adds up the start and the parts of steps; kept by the clock, where `goodput` finds it."""

    def __init__(self, start: Laps, clock: Clock | None) -> None:
        """`clock` is the first rank's."""
        self._start, self._clock = start, clock
        self._first: int | None = None
        self._told = False
        self._compiling = 0.0

    def begin(self, step: int, meter: Meter) -> None:
        """Steps begin, after step number `step`; but for the first time it is a rewind."""
        meter.restart()
        if self._first is None:
            self._first = step
            meter.totals.clear()  # the phases of the start have it all

    def started(self, meter: Meter) -> Record | None:
        """The record of the start, once; call before the first reading."""
        if self._told:
            return None
        self._told = True
        first_step, self._compiling = meter.first_step()
        phases = {**self._start.seconds, "first step": first_step}
        told = ", ".join(f"{phase} {took:.1f}" for phase, took in phases.items() if took >= 0.05)
        log.info("the first step was done after %.1f s: %s", sum(phases.values()), told)
        return {
            "kind": "start",
            "step": self._first,
            "seconds": {phase: round(seconds, 4) for phase, seconds in phases.items()},
            "matmul_flops": meter.matmul,
        }

    def end(self, step: int, meter: Meter) -> None:
        """No more steps: what came after the last reading counts, too."""
        meter.restart()
        self.keep(step, meter)

    def keep(self, step: int, meter: Meter) -> None:
        """The attempt has come to `step`, and its time was read."""
        if self._clock is None:
            return
        parts: defaultdict[str, float] = defaultdict(float, meter.totals)
        parts["start"] = sum(self._start.seconds.values()) + self._compiling
        parts["forward_backward"] -= self._compiling
        kept = {part: round(seconds, 3) for part, seconds in parts.items()}
        self._clock.tell(first=self._first, step=step, steps=meter.steps, parts=kept)
