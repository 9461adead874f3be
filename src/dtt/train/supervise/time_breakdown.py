"""The times of an attempt that other processes read: `clock.json` and `lead`."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from dtt.artifacts.jobdir import JobDir
from dtt.base.log import log
from dtt.jobs.clock import Clock, PhaseTimer
from dtt.mesh.process import in_words
from dtt.track.base import Record
from dtt.train.throughput import ThroughputMeter

RECENT = 10
"""Number of most recent log lines and saves of which the slowest counts."""


@dataclass(frozen=True)
class StopLead:
    """The time before a limit of the job at which a run must be asked to save and stop."""

    job: JobDir
    after_save: float
    """Seconds for which a run that stops may continue after its last save."""
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds per step of recent log lines."""
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of recent saves, until they were verified."""

    def write(self) -> None:
        """Write the file that a job script reads; call it after a save.

        On a full disk it logs a warning, and the next save writes the file again: ending the run is
        up to the checkpoints.
        """
        try:
            save = max(self.saves) + self.after_save
            self.job.write_lead(max(self.steps, default=0.0), save)
        except OSError as error:
            log.warning("lead is not up to date: %s", in_words(error))


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
        self._clock.fields = {
            "first": self._first, "step": step, "steps": meter.steps, "parts": rounded,
        }  # fmt: skip
