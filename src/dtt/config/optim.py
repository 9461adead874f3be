"""Optimizers and learning-rate schedules, as tagged unions: `type` picks one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class AdamWConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device has it."""

    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    """Peak learning rate of every parameter."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices; embeddings, the head, norms and biases are not decayed."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Betas are means: in [0, 1)."""
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield "betas", f"both must be in [0, 1), got {list(self.betas)}"


class MuonConfig(Section):
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for everything else.

    Updates are scaled by 0.2 * sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982), so that
    learning rates are of AdamW's size.
    """

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 2e-3
    """Peak learning rate of the hidden matrices."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the gradient average that is orthogonalised."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of the hidden matrices."""
    adamw: AdamWConfig = AdamWConfig(lr=2e-3)
    """For embeddings, head, norms and biases."""


OptimConfig = Annotated[MuonConfig | AdamWConfig, Field(discriminator="type")]


class Warmup(Section):
    """What every schedule shares: a linear start and a floor."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0 to its peak."""


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


class WsdConfig(Warmup):
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395)."""

    type: Literal["wsd"] = "wsd"
    decay: Share = 0.2
    """Share of the run that decays, at its end."""
    shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """How it decays: a straight line, or 1 - sqrt(progress) (arXiv 2405.18392)."""
    floor: Share = 0.0
    """Share of the peak at the end."""


ScheduleConfig = Annotated[
    ConstantConfig | LinearConfig | CosineConfig | WsdConfig, Field(discriminator="type")
]
