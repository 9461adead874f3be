"""Keys of the optimizers, a tagged union: `type` selects one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Decay of a running average: the weight of its old value."""
Betas = tuple[Decay, Decay]


class AdamWGroup(Section):
    """Settings for parameters selected by name; null: the settings of `optim`."""

    match: str
    """Pattern for full parameter names, such as `embed.weight` or `*norm.weight`: `*` matches any
    text, `?` one character, `[kv]` one of these. The first entry that matches a parameter
    applies."""
    lr: PositiveFloat | None = None
    """Peak learning rate."""
    betas: Betas | None = None
    """Decay of the first and second moment, with AdamW."""
    eps: PositiveFloat | None = None
    """Epsilon added to the square root of the second moment, with AdamW."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay; null: that of `optim` for hidden matrices, 0 for the others."""


class MuonGroup(AdamWGroup):
    """Settings for parameters selected by name; null: the settings of their optimizer."""

    optimizer: Literal["muon", "adamw"] | None = None
    """Optimizer of these parameters; null: Muon for hidden matrices, AdamW for the others."""
    split: PositiveInt | tuple[PositiveInt, ...] | None = None
    """Split of the rows for Muon: into this number of equal matrices, or into matrices with these
    numbers of rows. For fused projections, such as q, k and v."""


class AdamWSettings(Section):
    """AdamW settings for embeddings, output head, norms and biases, which have no weight decay."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon added to the square root of the second moment."""


class AdamWConfig(AdamWSettings):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device supports it."""

    type: Literal["adamw"] = "adamw"
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none."""
    groups: tuple[AdamWGroup, ...] = ()
    """Settings for parameters selected by name."""


class MuonConfig(Section):
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for all other parameters."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 2e-3
    """Peak learning rate of the hidden matrices."""
    scale: Literal["rms", "spectral"] = "rms"
    """Scale of the updates: `rms`: 0.2 * sqrt(max(rows, columns)), for which learning rates are
    about those of AdamW (Moonlight, arXiv 2502.16982); `spectral`: sqrt(max(1, rows / columns)), as
    Jordan et al., for which they are about ten times higher."""
    momentum: Decay = 0.95
    """Decay of the gradient average that is orthogonalised."""
    momentum_warmup: NonNegativeInt = 0
    """Steps of linear momentum warm-up from 0.85 to `momentum`; skipped steps do not count."""
    ns_coefficients: Literal["classic", "polar-express"] = "classic"
    """Polynomials of the Newton-Schulz iteration: `classic`: the same in all iterations, which
    brings singular values to about [0.7, 1.2]; `polar-express`: an optimal one for each (arXiv
    2505.16932)."""
    ns_steps: PositiveInt = 5
    """Number of Newton-Schulz iterations."""
    normuon_beta2: Decay | None = None
    """Decay of NorMuon's running average, such as 0.95 (arXiv 2510.05491): each row of the update
    is divided by its root mean square over the steps; null: no NorMuon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none."""
    cautious_weight_decay: bool = False
    """Decay only those weights that the update moves towards zero as well (arXiv 2510.12402)."""
    adamw: AdamWSettings = AdamWSettings(lr=2e-3)
    """AdamW settings for embeddings, output head, norms and biases."""
    groups: tuple[MuonGroup, ...] = ()
    """Settings for parameters selected by name."""


OptimConfig = Annotated[MuonConfig | AdamWConfig, Field(discriminator="type")]
