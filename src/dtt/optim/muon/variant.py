"""Muon as a variant of the section `optim`: for hidden matrices, with AdamW for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.optim import AdamWGroup, Beta, GroupedOptimizer
from dtt.config.schedule import RunFacts
from dtt.config.value_types import Decayed
from dtt.optim import adamw
from dtt.optim.adamw import AdamWSettings

if TYPE_CHECKING:  # keeps torch out of the check of a configuration
    from torch.optim import Optimizer

    from dtt.optim.groups import Settings
    from dtt.params.table import Param, Params

NAME = "muon"
"""Name of its optimizer in checkpoints."""


class MuonGroup(AdamWGroup):
    """Settings for parameters selected by role or name; null: those of their optimizer."""

    optimizer: Literal["muon", "adamw"] | None = None
    """Optimizer of these parameters; null: Muon for hidden matrices, AdamW for the others."""
    split: PositiveInt | tuple[PositiveInt, ...] | None = None
    """Split of the rows for Muon: into this number of equal matrices, or into matrices with these
    numbers of rows. For fused projections, such as q, k and v."""


class MuonConfig(GroupedOptimizer):
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for all other parameters."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 2e-3
    """Peak learning rate of the hidden matrices."""
    scale: Literal["rms", "spectral"] = "rms"
    """Scale of the updates: `rms`: 0.2 * sqrt(max(rows, columns)), for which learning rates are
    about those of AdamW (Moonlight, arXiv 2502.16982); `spectral`: sqrt(max(1, rows / columns)), as
    Jordan et al., for which they are about ten times higher."""
    momentum: Beta = 0.95
    """Decay of the gradient average that is orthogonalised."""
    momentum_warmup: NonNegativeInt = 0
    """Steps of linear momentum warm-up from 0.85 to `momentum`; skipped steps do not count."""
    normuon_beta2: Beta | None = None
    """Decay of NorMuon's running average, such as 0.95 (arXiv 2510.05491): each row of the update
    is divided by its root mean square over the steps; null: no NorMuon."""
    weight_decay: Decayed = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none. A number, or
    `{value: 0.2, horizon: true}`: the decay 1 / (0.2 * lr * steps), for which weights are the
    moving average of their updates over a fifth of the run (arXiv 2405.13698). `cautious: true`, as
    in `{value: 0.1, cautious: true}`, decays only those weights that the update moves towards zero
    as well (arXiv 2510.12402)."""
    adamw: AdamWSettings = AdamWSettings(lr=2e-3)
    """AdamW settings for embeddings, output head, norms and biases."""
    groups: tuple[MuonGroup, ...] = ()
    """Settings for parameters selected by role or by name."""

    def settings_of(self, param: Param, entry: AdamWGroup | None, run: RunFacts) -> Settings:
        """Return the settings of one parameter: Muon's for a matrix, else AdamW's."""
        from dtt.optim.groups import invalid_entry

        # A plain entry has no Muon options, so it assigns nothing to Muon.
        given = entry if isinstance(entry, MuonGroup) else MuonGroup(match=param.name)
        owner = given.optimizer or (NAME if param.role == "matrix" else adamw.NAME)
        if owner == NAME:
            return self._settings(param, given, run)
        if given.split is not None:
            why = f"AdamW updates {param.name}, but split is an option of Muon"
            raise invalid_entry(given, why)
        return adamw.adamw_settings(self.adamw, self.weight_decay, param, entry, run)

    def _settings(self, param: Param, entry: MuonGroup, run: RunFacts) -> Settings:
        """Return the settings of a parameter that Muon updates."""
        from dtt.optim.groups import Settings, invalid_entry, rate_and_decay

        name, shape = param.name, list(param.layout.shape)
        if len(shape) not in (2, 3):
            why = f"Muon is for matrices and stacks: {name} has the shape {shape}"
            raise invalid_entry(entry, why)
        if entry.betas is not None or entry.eps is not None:
            why = f"Muon updates {name}, but betas and eps are options of AdamW"
            raise invalid_entry(entry, why)
        split, rows = entry.split, shape[-2]
        # `split: 3` means three equal matrices, as in a fused q, k, v.
        if isinstance(split, int):
            split = (rows // split,) * split
        if split is not None and sum(split) != rows:
            raise invalid_entry(entry, f"{name} has {rows} rows, but split has {sum(split)}")
        given = self.weight_decay if entry.weight_decay is None else entry.weight_decay
        # The exponent by which rates shrink with the width under muP: `dtt.model.scaling` says why.
        power = 0.5 if self.scale == "rms" else 0.0
        lr, decay, cautious = rate_and_decay(entry.lr or self.lr, given, param, power, run)
        return Settings(
            NAME,
            lr=lr,
            weight_decay=decay,
            cautious=cautious,
            split=split,
        )

    def build(self, params: Params, run: RunFacts) -> dict[str, Optimizer]:
        """Return Muon and AdamW; without one of them on a rank that has nothing for it."""
        import torch

        from dtt.optim.groups import grouped
        from dtt.optim.muon.optimizer import Muon
        from dtt.optim.muon.redistribution import Layouts

        groups = grouped(self, params, run)
        optimizers: dict[str, Optimizer] = {}
        if NAME in groups:
            layouts: Layouts = {param.tensor: param.layout for param in params.values()}
            # Newton-Schulz runs in the dtype of the forward pass: its result is approximate anyway.
            optimizers[NAME] = Muon(
                groups[NAME], self, run.dtype or torch.float32, run.rounding, layouts
            )
        return optimizers | adamw.adamw_optimizers(groups, run)
