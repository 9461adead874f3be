"""Optimizers, as a tagged union: `type` picks one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Of a running mean: the share of the old that is kept."""
Betas = tuple[Decay, Decay]


class RoleConfig(Section):
    """What AdamW does otherwise for the parameters of one role."""

    lr: PositiveFloat | None = None
    """Peak learning rate; null: that of the section above."""
    betas: Betas | None = None
    """Decay of the first and second moment; null: those of the section above."""
    eps: PositiveFloat | None = None
    """Added to the root of the second moment; null: that of the section above."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay."""


class GroupConfig(Section):
    """What is otherwise for parameters by their name; null: as for their role."""

    match: str
    """Pattern for whole names of parameters, as `layers.*.attn.?.weight`: `*` is any text, `?` one
    character, `[kv]` one of these. The first entry that matches a parameter decides."""
    optimizer: Literal["muon", "adamw"] | None = None
    """Which optimizer takes them; `muon` needs `optim.type: muon`."""
    lr: PositiveFloat | None = None
    """Peak learning rate."""
    betas: Betas | None = None
    """Decay of the first and second moment, with AdamW."""
    eps: PositiveFloat | None = None
    """Added to the root of the second moment, with AdamW."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled decay."""
    split: PositiveInt | tuple[PositiveInt, ...] | None = None
    """Muon takes the rows as so many matrices of one size, or as matrices of these many rows: for
    projections that are stored as one, such as q, k and v."""


class AdamWSettings(Section):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device has it."""

    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of hidden matrices; embeddings, the head and vectors have their own."""
    embed: RoleConfig = RoleConfig()
    """For embeddings, tied ones included."""
    head: RoleConfig = RoleConfig()
    """For the output head."""
    vector: RoleConfig = RoleConfig()
    """For norms and biases."""


class AdamWConfig(AdamWSettings):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device has it."""

    groups: tuple[GroupConfig, ...] = ()
    """Parameters that are treated otherwise, by name."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """There is no Muon here."""
        if any(entry.optimizer == "muon" or entry.split for entry in self.groups):
            yield "groups", "optimizer: muon and split need optim.type: muon"


class MuonConfig(Section):
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for everything else."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 2e-3
    """Peak learning rate of the hidden matrices."""
    scale: Literal["rms", "spectral"] = "rms"
    """What updates are multiplied by: `rms`: 0.2 * sqrt(max(rows, columns)), so that learning rates
    are of AdamW's size (Moonlight, arXiv 2502.16982); `spectral`: sqrt(max(1, rows / columns)), as
    Jordan et al., with rates of about ten times that."""
    momentum: Decay = 0.95
    """Decay of the gradient average that is orthogonalised."""
    momentum_start: Decay = 0.85
    """Momentum of the first step, when it warms up."""
    momentum_warmup: NonNegativeInt = 0
    """Steps over which the momentum goes in a line from `momentum_start` to `momentum`; steps that
    are skipped do not count."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    ns_coefficients: Literal["classic", "polar-express"] = "classic"
    """How updates are orthogonalised: `classic`: one polynomial in all iterations, singular values
    end in about [0.7, 1.2]; `polar-express`: the best one for each (arXiv 2505.16932)."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    normuon_beta2: Decay | None = None
    """NorMuon (arXiv 2510.05491): rows of the update are divided by the root of their mean square
    over the steps, which decays by this, as 0.95; null: they are not."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of the hidden matrices."""
    cautious_weight_decay: bool = False
    """Decay only weights that the update makes smaller, too (arXiv 2510.12402)."""
    adamw: AdamWSettings = AdamWSettings(lr=2e-3)
    """For embeddings, head, norms and biases."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters that are treated otherwise, by name."""


OptimConfig = Annotated[MuonConfig | AdamWConfig, Field(discriminator="type")]
