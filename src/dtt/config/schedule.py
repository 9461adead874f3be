"""Learning-rate schedules, as a tagged union: `type` picks one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from dtt.config.base import Length, Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Warmup(Section):
    """What every schedule begins with."""

    warmup: Length = 0
    """How long the rate rises linearly from 0 to its peak: steps (`200`), a share of the run
    (`0.02`, `2%`), or `50M tokens`."""


class ConstantConfig(Warmup):
    """The peak rate to the end."""

    type: Literal["constant"] = "constant"


class LinearConfig(Warmup):
    """Straight from the peak to `floor`."""

    type: Literal["linear"] = "linear"
    floor: Share = 0.0
    """Share of the peak at the end."""


class CosineConfig(Warmup):
    """Half a cosine from the peak to `floor` (arXiv 1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"
    floor: Share = 0.1
    """Share of the peak at the end."""


class InverseSqrtConfig(Warmup):
    """The peak times sqrt(warm-up / step), as in arXiv 1706.03762."""

    type: Literal["inverse-sqrt"] = "inverse-sqrt"


class WsdConfig(Warmup):
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395)."""

    type: Literal["wsd"] = "wsd"
    decay: Length = 0.2
    """How long the rate falls, at the end: steps (`2000`), a share of the run (`0.2`, `20%`), or
    `50M tokens`; at most all that is left after the warm-up."""
    shape: Literal["1-sqrt", "linear", "cosine", "exponential", "power"] = "1-sqrt"
    """How it falls over the progress p of the decay: 1 - sqrt(p) (arXiv 2405.18392), 1 - p, half a
    cosine, floor^p (by the same factor in every step), or (1 - p)^exponent."""
    exponent: PositiveFloat = 2.0
    """That of `shape: power`."""
    floor: Share = 0.0
    """Share of the peak at the end."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """An exponential never comes to zero."""
        if self.shape == "exponential" and self.floor == 0.0:
            yield "floor", "an exponential decay never comes to 0: give a floor, such as 0.01"


ScheduleConfig = Annotated[
    ConstantConfig | LinearConfig | CosineConfig | InverseSqrtConfig | WsdConfig,
    Field(discriminator="type"),
]
