"""Learning-rate schedules: pure functions of progress, one multiplier for all groups."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from dtt.config.base import Length, measure
from dtt.config.schedule import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    ScheduleConfig,
    WsdConfig,
)

TokensBefore = Callable[[int], int]
"""Tokens of all steps before this one; never falls."""
Curve = Callable[[float], float]
"""From 1 at progress 0 down to 0 at progress 1."""
CONSTANT = "constant"
DECAY = {"begin": int, "end": int, "since": int, "done": float}
"""Fields of a `Decay` as a checkpoint keeps it."""


@dataclass(frozen=True)
class Decay:
    """The steps over which the rate falls."""

    begin: int
    """The first, which still has the peak."""
    end: int
    """The first after it: its progress would be 1."""
    since: int
    """The step at which `end` was last planned anew, else `begin`."""
    done: float = 0.0
    """Progress at `since`."""

    def progress(self, step: int) -> float:
        """Progress of a step since `since`: never falls, below 1 up to the last step."""
        share = (step - self.since) / (self.end - self.since)
        return self.done + (1.0 - self.done) * min(max(share, 0.0), 1.0)

    def ending(self, step: int, end: int) -> Decay:
        """The same until `step`; from there on at the pace that ends before step `end`."""
        return Decay(self.begin, end, step, self.progress(step))


@dataclass(frozen=True)
class Schedule:
    """A schedule set against a run: what it does in which step. Steps count from 0."""

    warmup: int
    """The first of w steps gets 1/w of the peak, the last all of it."""
    decay: Decay | None
    """None: the peak rate to the end, or until the clock begins the decay."""
    curve: Curve = field(repr=False)
    floor: float
    """Share of the peak. The last step gets its neighbour: no update is wasted on a rate of 0."""
    name: str
    """Of the curve."""

    def multiplier(self, step: int) -> float:
        """Share of the peak rate for a step."""
        rise = (step + 1) / self.warmup if step < self.warmup else 1.0
        if self.decay is None:
            return rise
        fall = self.curve(self.decay.progress(step))
        return min(rise, self.floor + (1.0 - self.floor) * fall)

    def ending(self, step: int, end: int) -> Schedule:
        """The same before `step`; the decay, which begins there if it has not, ends at `end`."""
        decay = self.decay or Decay(step, end, step)
        return replace(self, decay=decay.ending(step, end))

    @property
    def waits(self) -> bool:
        """Whether its decay is still for the clock to begin."""
        return self.decay is None and self.name != CONSTANT

    def describe(self) -> str:
        """In a line, counting steps from 1 as logs do."""
        start = f"warm-up until step {self.warmup}, " if self.warmup else ""
        if self.decay is None:
            return start + (f"decay ({self.name}) in time" if self.waits else self.name)
        last = self.decay.end
        share = f"{100 * self.multiplier(last - 1):.3g}% of the peak in step {last}"
        return f"{start}decay ({self.name}) from step {self.decay.begin + 1}, {share}"


def resolve(config: ScheduleConfig, steps: int, tokens_before: TokensBefore) -> Schedule:
    """Set a schedule against a run of `steps`."""
    warmup = first_steps(config.warmup, steps, tokens_before)
    curve: Curve
    match config:
        case ConstantConfig():
            return Schedule(warmup, None, _linear, 1.0, CONSTANT)
        case LinearConfig():
            begin, curve, floor, name = warmup, _linear, config.floor, "linear"
        case CosineConfig():
            begin, curve, floor, name = warmup, _cosine, config.floor, "cosine"
        case InverseSqrtConfig():
            # Update number u gets sqrt(w / u); the first after the peak is number w + 1.
            peak = max(1, warmup)
            curve = partial(_inverse_sqrt, (steps - peak + 1) / peak)
            begin, floor, name = peak - 1, 0.0, "1/sqrt(step)"
        case WsdConfig():
            begin = max(warmup, before_last(config.decay, steps, tokens_before))
            curve, floor, name = shape(config), config.floor, config.shape
        case _:
            assert_never(config)
    if begin >= steps:  # no step is left to decay in
        return Schedule(warmup, None, curve, floor, CONSTANT)
    return Schedule(warmup, Decay(begin, steps, begin), curve, floor, name)


def first_steps(length: Length, steps: int, tokens_before: TokensBefore) -> int:
    """How many steps a length at the start of a run takes: of tokens, so many or more."""
    unit, value = measure(length)
    if unit == "tokens":
        return bisect_left(range(steps), math.ceil(value), key=tokens_before)
    return round(value * steps) if unit == "share" else int(value)


def before_last(length: Length, steps: int, tokens_before: TokensBefore) -> int:
    """The step at which a length at the end of a run begins: of tokens, so many or more."""
    unit, value = measure(length)
    if unit == "tokens":
        left = tokens_before(steps) - math.ceil(value)
        return max(0, bisect_right(range(steps + 1), left, key=tokens_before) - 1)
    return max(0, steps - (round(value * steps) if unit == "share" else int(value)))


def shape(config: WsdConfig) -> Curve:
    """The curve of a decay."""
    match config.shape:
        case "1-sqrt":
            return _one_minus_sqrt
        case "linear":
            return _linear
        case "cosine":
            return _cosine
        case "exponential":
            return partial(_exponential, config.floor)
        case "power":
            return partial(_power, config.exponent)
        case _:
            assert_never(config.shape)


def _linear(progress: float) -> float:
    return 1.0 - progress


def _one_minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _power(exponent: float, progress: float) -> float:
    return float((1.0 - progress) ** exponent)


def _exponential(floor: float, progress: float) -> float:
    """The share above the floor of a rate that is floor^progress."""
    return (floor**progress - floor) / (1.0 - floor) if floor < 1.0 else 0.0


def _inverse_sqrt(length: float, progress: float) -> float:
    """`length` in units of the warm-up."""
    return 1.0 / math.sqrt(1.0 + length * progress)
