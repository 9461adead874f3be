"""Keys of the learning-rate schedules, a tagged union: `type` selects one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dtt.config.base import Length, LengthKey, Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Warmup(Section):
    """The common keys of all schedules."""

    warmup: LengthKey = Length(0)
    """Duration of the linear warm-up from 0 to the peak: steps (`200`), a share of the run (`0.02`,
    `2%`), or `50M tokens`."""


class ConstantConfig(Warmup):
    """The peak learning rate until the end."""

    type: Literal["constant"] = "constant"


class LinearConfig(Warmup):
    """Linear decay from the peak to `floor`."""

    type: Literal["linear"] = "linear"
    floor: Share = 0.0
    """Learning rate at the end, as a share of the peak."""


class CosineConfig(Warmup):
    """Cosine decay from the peak to `floor` (arXiv 1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"
    floor: Share = 0.1
    """Learning rate at the end, as a share of the peak."""


class InverseSqrtConfig(Warmup):
    """The peak times sqrt(warm-up / step), as in arXiv 1706.03762."""

    type: Literal["inverse-sqrt"] = "inverse-sqrt"


class WsdConfig(Warmup):
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


ScheduleConfig = Annotated[
    ConstantConfig | LinearConfig | CosineConfig | InverseSqrtConfig | WsdConfig,
    Field(discriminator="type"),
]
