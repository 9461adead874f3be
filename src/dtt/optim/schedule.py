"""Learning-rate schedules: pure functions of progress, and multipliers of peak rates."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from dtt.config.base import Length
from dtt.config.schedule import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    ScheduleConfig,
    WsdConfig,
)

TokensBefore = Callable[[int], int]
"""A function that returns the number of tokens of all steps before a step; non-decreasing."""
Curve = Callable[[float], float]
"""A function that falls from 1 at progress 0 to 0 at progress 1."""
CONSTANT = "constant"
DECAY = {"begin": int, "end": int, "since": int, "done": float}
"""Fields of a `Decay` in a checkpoint, and their types."""


@dataclass(frozen=True)
class Decay:
    """The range of steps over which the learning rate decays."""

    begin: int
    """First step of the decay, which still has the peak rate."""
    end: int
    """Step after the last one of the decay; its progress would be 1."""
    since: int
    """Step at which `end` was last changed; `begin` if it never was."""
    done: float = 0.0
    """Progress at step `since`."""

    def progress(self, step: int) -> float:
        """Return the progress of the decay at a step from `since` on.

        Non-decreasing, and below 1 for every step before `end`.
        """
        # The denominator is positive: a decay is made only if a step is left for it.
        share = (step - self.since) / (self.end - self.since)
        return self.done + (1.0 - self.done) * min(max(share, 0.0), 1.0)

    def ending(self, step: int, end: int) -> Decay:
        """Return the same decay up to `step`, and from there one that reaches 1 at step `end`."""
        return Decay(self.begin, end, step, self.progress(step))


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule resolved for a run. Steps count from 0."""

    warmup: int
    """Number w of warm-up steps: the first has 1/w of the peak rate, the last the full peak."""
    decay: Decay | None
    """None: the rate stays at the peak to the end, or until the time budget starts the decay."""
    curve: Curve = field(repr=False)
    """Shape of the decay."""
    floor: float
    """Fraction of the peak that the decay would reach at step `decay.end`. The last step is the one
    before it: no update is wasted on a rate of 0."""
    name: str
    """Name of the curve."""
    own: Mapping[Length, Schedule] = field(default_factory=dict)
    """Schedules of the parameter groups that have their own duration of the decay."""

    def multiplier(self, step: int) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        # The first update has a rate above 0: a step without effect would be wasted.
        rise = (step + 1) / self.warmup if step < self.warmup else 1.0
        if self.decay is None:
            return rise
        fall = self.curve(self.decay.progress(step))
        # The smaller one: with inverse square root the decay begins at the last step of the
        # warm-up.
        return min(rise, self.floor + (1.0 - self.floor) * fall)

    def own_multipliers(self, step: int) -> dict[Length, float]:
        """Return the multipliers of groups with their own decay, by its duration."""
        return {length: schedule.multiplier(step) for length, schedule in self.own.items()}

    @property
    def first_decay(self) -> Decay | None:
        """The decay that starts first, of those of all groups; None without any."""
        decays = [s.decay for s in (self, *self.own.values()) if s.decay is not None]
        return min(decays, key=lambda decay: decay.begin, default=None)

    def ending(self, step: int, end: int) -> Schedule:
        """Return the same schedule before `step`, with a decay that ends at step `end`.

        A decay that has not started yet starts at `step`.
        """
        decay = self.decay or Decay(step, end, step)
        # `since` moves to `step`, so that the past part of the curve stays: the rate never jumps
        # when the budget changes the end.
        return replace(self, decay=decay.ending(step, end))

    @property
    def waits(self) -> bool:
        """True if the time budget has not started the decay yet."""
        return self.decay is None and self.name != CONSTANT

    def describe(self) -> str:
        """Return a one-line summary; it counts steps from 1, as logs do."""
        start = f"warm-up until step {self.warmup}, " if self.warmup else ""
        if self.decay is None:
            return start + (f"decay ({self.name}) in time" if self.waits else self.name)
        last = self.decay.end
        share = f"{100 * self.multiplier(last - 1):.3g}% of the peak in step {last}"
        own = [
            f"; {length} in their own groups from step {schedule.decay.begin + 1}"
            for length, schedule in self.own.items()
            if schedule.decay is not None
        ]
        return f"{start}decay ({self.name}) from step {self.decay.begin + 1}, {share}{''.join(own)}"


def resolve(
    config: ScheduleConfig, steps: int, tokens_before: TokensBefore, own: Iterable[Length] = ()
) -> Schedule:
    """Resolve a schedule for a run of `steps` steps.

    `own` are the durations of the decays of parameter groups, for a WSD schedule.
    """
    if own := tuple(own):
        assert isinstance(config, WsdConfig), "the configuration was checked"
        # A copy of the configuration with another decay, so that groups use the same code path.
        groups = {
            length: resolve(config.model_copy(update={"decay": length}), steps, tokens_before)
            for length in own
        }
        return replace(resolve(config, steps, tokens_before), own=groups)
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
            # Update u, counted from 1, has sqrt(w / u) of the peak; w + 1 is the first below it.
            peak = max(1, warmup)
            curve = partial(_inverse_sqrt, (steps - peak + 1) / peak)
            begin, floor, name = peak - 1, 0.0, "1/sqrt(step)"
        case WsdConfig():
            begin = max(warmup, before_last(config.decay, steps, tokens_before))
            curve, floor, name = shape(config), config.floor, config.shape
        case _:
            assert_never(config)
    if begin >= steps:  # no step is left to decay in
        # The warm-up takes the whole run, or the decay is 0 steps long.
        return Schedule(warmup, None, curve, floor, CONSTANT)
    return Schedule(warmup, Decay(begin, steps, begin), curve, floor, name)


def first_steps(length: Length, steps: int, tokens_before: TokensBefore) -> int:
    """Return the number of steps of a length at the start of a run.

    For a length in tokens, the fewest steps with at least that number of tokens.
    """
    unit, value = length.unit, length.amount
    if unit == "tokens":
        return bisect_left(range(steps), math.ceil(value), key=tokens_before)
    return round(value * steps) if unit == "share" else int(value)


def before_last(length: Length, steps: int, tokens_before: TokensBefore) -> int:
    """Return the step at which a length at the end of a run starts.

    For a length in tokens, the last step from which at least that number of tokens remains.
    """
    unit, value = length.unit, length.amount
    if unit == "tokens":
        left = tokens_before(steps) - math.ceil(value)
        # Searched, not divided: under a batch-size schedule, steps have different numbers of
        # tokens.
        return max(0, bisect_right(range(steps + 1), left, key=tokens_before) - 1)
    return max(0, steps - (round(value * steps) if unit == "share" else int(value)))


def shape(config: WsdConfig) -> Curve:
    """Return the decay curve of a WSD schedule."""
    match config.shape:
        case "1-sqrt":
            return _one_minus_sqrt
        case "linear":
            return _linear
        case "cosine":
            return _cosine
        case "exponential":
            return partial(_exponential, config.floor)
        case _:
            assert_never(config.shape)


def _linear(progress: float) -> float:
    return 1.0 - progress


def _one_minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _exponential(floor: float, progress: float) -> float:
    """Return the curve for which the multiplier, floor included, is floor^progress."""
    return (floor**progress - floor) / (1.0 - floor) if floor < 1.0 else 0.0


def _inverse_sqrt(length: float, progress: float) -> float:
    """Return 1 / sqrt(1 + length * progress); `length` of the decay is in units of the warm-up."""
    return 1.0 / math.sqrt(1.0 + length * progress)
