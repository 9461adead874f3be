"""AdamW as a variant of the section `optim`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from dtt.config.base import Section
from dtt.config.optim import AdamWGroup, Betas, GroupedOptimizer
from dtt.config.schedule import RunFacts
from dtt.config.weight_decay import Decayed

if TYPE_CHECKING:  # keeps torch out of the check of a configuration
    from torch.optim import Optimizer

    from dtt.optim.groups import Settings
    from dtt.params.table import Param, Params

NAME = "adamw"
"""Name of its optimizer in checkpoints, which Muon has as well, for other parameters."""


class AdamWSettings(Section):
    """AdamW settings for embeddings, output head, norms and biases, which have no weight decay."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon added to the square root of the second moment."""


class AdamWConfig(AdamWSettings, GroupedOptimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device supports it."""

    type: Literal["adamw"] = "adamw"
    weight_decay: Decayed = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none. A number, or
    `horizon 0.2`: the decay 1 / (0.2 * lr * steps), for which weights are the moving average of
    their updates over a fifth of the run (arXiv 2405.13698). `cautious 0.1` and `cautious horizon
    0.2` decay only those weights that the update moves towards zero as well (arXiv 2510.12402)."""
    groups: tuple[AdamWGroup, ...] = ()
    """Settings for parameters selected by role or by name."""

    def settings_of(self, param: Param, entry: AdamWGroup | None, run: RunFacts) -> Settings:
        """Return the settings of one parameter."""
        return adamw_settings(self, self.weight_decay, param, entry, run)

    def build(self, params: Params, run: RunFacts) -> dict[str, Optimizer]:
        """Return one optimizer for all parameters; none for a rank that has none."""
        from dtt.optim.adamw_optimizers import make_adamw
        from dtt.optim.groups import grouped

        groups = grouped(self, params, run)
        return {name: make_adamw(of_name, run.rounding) for name, of_name in groups.items()}


def adamw_settings(
    given: AdamWSettings,
    weight_decay: float | str,
    param: Param,
    entry: AdamWGroup | None,
    run: RunFacts,
) -> Settings:
    """Return the settings of a parameter that AdamW updates.

    `weight_decay` is that of matrices, routers and adapters. Under muP, rates of matrices shrink
    with the width.
    """
    from dtt.optim.groups import Settings, rate_and_decay

    entry = entry or AdamWGroup(match=param.name)
    if entry.weight_decay is not None:
        weight_decay = entry.weight_decay
    elif param.role not in ("matrix", "router", "adapter"):
        weight_decay = 0.0
    lr, decay, cautious = rate_and_decay(entry.lr or given.lr, weight_decay, param, 1.0, run)
    return Settings(
        NAME,
        lr=lr,
        weight_decay=decay,
        cautious=cautious or None,
        decay=entry.decay,
        betas=entry.betas or given.betas,
        eps=entry.eps or given.eps,
    )
