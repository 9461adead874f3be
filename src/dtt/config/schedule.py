"""Learning-rate schedules: keys and behaviour of each in one class; `type` selects one."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dtt.config.base import Length, LengthKey, Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]
TokensBefore = Callable[[int], int]
"""A function that returns the number of tokens of all steps before a step; non-decreasing."""


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
class RunFacts:
    """The facts of a run that are known before it starts. Steps count from 0."""

    steps: int
    """Number of steps of the run; with a time budget, the most."""
    warmup: int = 0
    """Number of steps of the warm-up."""
    tokens_before: TokensBefore = lambda step: step
    """Function that returns the number of tokens of all steps before a step."""
    decay: Decay | None = None
    """The decay that starts where `Schedule.begin` says; None: there is none, or not yet."""
    lr_factor: Callable[[Any, float], float] = lambda param, power: 1.0
    """Function that returns the factor of muP on the learning rate of a `dtt.Param`: for a hidden
    matrix, width to the power of -`power`, such as 1 for Adam, and a factor of the depth."""
    dtype: Any = None
    """The torch dtype of the products of the forward pass, for `Optimizer.build`."""
    rounding: Any = None
    """The stochastic rounding of bf16 weights, for `Optimizer.build`; None: to nearest."""


class Schedule(Section):
    """The base class of schedules. One of your own defines keys and `multiplier`."""

    type: str
    warmup: LengthKey = Length(0)
    """Duration of the linear warm-up from 0 to the peak: steps (`200`), a share of the run (`0.02`,
    `2%`), or `50M tokens`."""

    def multiplier(self, step: int, run: RunFacts) -> float:
        """Return the learning rate of a step, counted from 0, as a fraction of the peak.

        It depends on nothing but its arguments, as a resumed run asks for the same steps again. The
        warm-up comes from dtt, which takes the smaller of both.
        """
        raise NotImplementedError

    def begin(self, run: RunFacts) -> int | None:
        """Return the step from which on the rate depends on where the run ends; None: no such step.

        No branch of another length can begin after it. By default all steps depend on it.
        """
        return 0

    @property
    def curve(self) -> str:
        """The name of the curve, for messages."""
        return self.type


class Decaying(Schedule):
    """The base class of schedules that stay at the peak, and then fall from it.

    A run may move the end of the decay: a branch, or a time budget. So the curve is a function of
    the progress, and not of the step.
    """

    floor: Share = 0.0
    """Learning rate at the end, as a share of the peak. The decay would reach it in the step after
    the last: no update is wasted on a rate of 0."""

    def begin(self, run: RunFacts) -> int | None:
        """Return the first step of the decay: the one after the warm-up."""
        return run.warmup

    def fall(self, progress: float, run: RunFacts) -> float:
        """Return the curve, which falls from 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError

    def multiplier(self, step: int, run: RunFacts) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        if run.decay is None:
            return 1.0
        return self.floor + (1.0 - self.floor) * self.fall(run.decay.progress(step), run)


class ConstantConfig(Schedule):
    """The peak learning rate until the end."""

    type: Literal["constant"] = "constant"

    def multiplier(self, step: int, run: RunFacts) -> float:
        """Return 1."""
        return 1.0

    def begin(self, run: RunFacts) -> int | None:
        """Return None: the rate never falls."""
        return None


class LinearConfig(Decaying):
    """Linear decay from the peak to `floor`."""

    type: Literal["linear"] = "linear"

    def fall(self, progress: float, run: RunFacts) -> float:
        """Return 1 - p."""
        return 1.0 - progress


class CosineConfig(Decaying):
    """Cosine decay from the peak to `floor` (arXiv 1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"
    floor: Share = 0.1
    """Learning rate at the end, as a share of the peak."""

    def fall(self, progress: float, run: RunFacts) -> float:
        """Return half a cosine."""
        return _cosine(progress)


class InverseSqrtConfig(Schedule):
    """The peak times sqrt(warm-up / step), as in arXiv 1706.03762."""

    type: Literal["inverse-sqrt"] = "inverse-sqrt"

    def begin(self, run: RunFacts) -> int | None:
        """Return the last step of the warm-up.

        Update u, counted from 1, has sqrt(w / u) of the peak; w + 1 is the first below it.
        """
        return max(1, run.warmup) - 1

    def multiplier(self, step: int, run: RunFacts) -> float:
        """Return sqrt(w / u) for update u."""
        if run.decay is None:
            return 1.0
        peak = max(1, run.warmup)
        # The length of the decay, in units of the warm-up.
        length = (run.steps - peak + 1) / peak
        return 1.0 / math.sqrt(1.0 + length * run.decay.progress(step))

    @property
    def curve(self) -> str:
        """The name of the curve, for messages."""
        return "1/sqrt(step)"


class WsdConfig(Decaying):
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395)."""

    type: Literal["wsd"] = "wsd"
    decay: LengthKey = Length(0.2)
    """Duration of the decay at the end: steps (`2000`), a share of the run (`0.2`, `20%`), or
    `50M tokens`; at most all steps after the warm-up."""
    shape: Literal["1-sqrt", "linear", "cosine", "exponential"] = "1-sqrt"
    """Shape of the decay over its progress p: 1 - sqrt(p) (arXiv 2405.18392), 1 - p, half a cosine,
    or floor^p (the same factor in every step)."""
    floor: Share = 0.0
    """Learning rate at the end, as a share of the peak."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for an exponential decay to 0, which it never reaches."""
        if self.shape == "exponential" and self.floor == 0.0:
            yield "floor", "an exponential decay never reaches 0: set a floor, such as 0.01"

    def begin(self, run: RunFacts) -> int | None:
        """Return the first step of the decay."""
        return max(run.warmup, before_last(self.decay, run.steps, run.tokens_before))

    def fall(self, progress: float, run: RunFacts) -> float:
        """Return the curve that `shape` names."""
        match self.shape:
            case "1-sqrt":
                return 1.0 - math.sqrt(progress)
            case "linear":
                return 1.0 - progress
            case "cosine":
                return _cosine(progress)
            case "exponential":
                # The multiplier, floor included, is floor^progress.
                floor = self.floor
                return (floor**progress - floor) / (1.0 - floor) if floor < 1.0 else 0.0

    @property
    def curve(self) -> str:
        """The name of the curve, for messages."""
        return self.shape


if TYPE_CHECKING:
    ScheduleConfig = Schedule  # it may be one of a user's own
else:
    ScheduleConfig = Annotated[
        ConstantConfig | LinearConfig | CosineConfig | InverseSqrtConfig | WsdConfig,
        Field(discriminator="type"),
    ]


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


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))
