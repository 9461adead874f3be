"""Learning-rate schedules of dtt, as variants of the section `schedule`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dtt.config.base import Length, LengthKey
from dtt.config.schedule import RunFacts, Schedule, before_last

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Decaying(Schedule):
    """The base class of schedules that stay at the peak, and then fall from it.

    A time budget decides where the decay is. So the curve is a function of the progress, and not of
    the step.
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


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))
