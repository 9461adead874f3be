"""Learning-rate schedules: pure functions of progress, one multiplier for all groups."""

from __future__ import annotations

import math
from typing import assert_never

from dtt.config.optim import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    ScheduleConfig,
    WsdConfig,
)


def multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Share of the peak rate for the update number `step` (0 … steps - 1) of `steps`.

    The first of w warm-up steps gets 1/w of the peak, the last all of it; the last step of the run
    gets the floor's neighbour, so that no update is wasted on a rate of zero.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    match schedule:
        case ConstantConfig():
            return 1.0
        case LinearConfig():
            return _between(schedule.floor, 1.0 - _progress(schedule.warmup_steps, step, steps))
        case CosineConfig():
            angle = math.pi * _progress(schedule.warmup_steps, step, steps)
            return _between(schedule.floor, 0.5 * (1.0 + math.cos(angle)))
        case WsdConfig():
            start = max(schedule.warmup_steps, steps - round(schedule.decay * steps))
            if step < start:
                return 1.0
            done = _progress(start, step, steps)
            down = 1.0 - done if schedule.shape == "linear" else 1.0 - math.sqrt(done)
            return _between(schedule.floor, down)
        case _:
            assert_never(schedule)


def _progress(start: int, step: int, steps: int) -> float:
    """Where `step` lies in start … steps, from 0 to just below 1."""
    return (step - start) / (steps - start)


def _between(floor: float, share: float) -> float:
    return floor + (1.0 - floor) * share
