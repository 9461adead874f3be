"""The base class of learning-rate schedules. `dtt.config.variants` lists those of dtt."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtt.config.base import Length, LengthKey, Section

TokensBefore = Callable[[int], int]
"""A function that returns the number of tokens of all steps before a step; non-decreasing."""


@dataclass(frozen=True)
class Decay:
    """The range of steps over which the learning rate decays."""

    begin: int
    """First step of the decay, which still has the peak rate."""
    end: int
    """Step after the last one of the decay; its progress would be 1."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decay:
        """Return the decay in a checkpoint, which may have more fields if it is an older one."""
        return cls(record["begin"], record["end"])

    def progress(self, step: int) -> float:
        """Return the progress of the decay: non-decreasing, and below 1 before `end`."""
        # The denominator is positive: a decay is made only if a step is left for it.
        return min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)


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
