"""AdamW as a variant of the section `optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat

from dtt.config.base import Section
from dtt.config.optim import AdamWGroup, Betas, GroupedOptimizer
from dtt.config.schedule import RunFacts
from dtt.config.value_types import Decayed

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
    state: Literal["32bit", "8bit"] = "32bit"
    """Size of each number of the moments. `8bit`: those of hidden matrices, an untied head and
    adapters are kept as block-wise 8-bit codes (arXiv 2110.02861), a quarter of their memory;
    embeddings, vectors and small tensors keep `32bit`, which is 16 with bf16 weights."""


class AdamWConfig(AdamWSettings, GroupedOptimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device supports it."""

    type: Literal["adamw"] = "adamw"
    weight_decay: Decayed = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none. A number, or
    `{value: 0.2, horizon: true}`: the decay 1 / (0.2 * lr * steps), for which weights are the
    moving average of their updates over a fifth of the run (arXiv 2405.13698). `cautious: true`, as
    in `{value: 0.1, cautious: true}`, decays only those weights that the update moves towards zero
    as well (arXiv 2510.12402)."""
    groups: tuple[AdamWGroup, ...] = ()
    """Settings for parameters selected by role or by name."""

    def settings_of(self, param: Param, entry: AdamWGroup | None, run: RunFacts) -> Settings:
        """Return the settings of one parameter."""
        return adamw_settings(self, self.weight_decay, param, entry, run)

    def build(self, params: Params, run: RunFacts) -> dict[str, Optimizer]:
        """Return one optimizer for all parameters; none for a rank that has none."""
        from dtt.optim.groups import grouped

        return adamw_optimizers(grouped(self, params, run), run)


def adamw_optimizers(
    groups: Mapping[str, list[dict[str, Any]]], run: RunFacts
) -> dict[str, Optimizer]:
    """Return the AdamW of each state size for the groups of `dtt.optim.groups.grouped`."""
    from dtt.optim import eight_bit
    from dtt.optim.adamw_optimizers import AdamW8bit, make_adamw

    made: dict[str, Optimizer] = {}
    if NAME in groups:
        made[NAME] = make_adamw(groups[NAME], run.rounding)
    if eight_bit.NAME in groups:
        made[eight_bit.NAME] = AdamW8bit(groups[eight_bit.NAME], run.rounding)
    return made


def adamw_settings(
    given: AdamWSettings,
    weight_decay: float | Mapping[str, Any],
    param: Param,
    entry: AdamWGroup | None,
    run: RunFacts,
) -> Settings:
    """Return the settings of a parameter that AdamW updates.

    `weight_decay` is that of matrices, routers and adapters. Under muP, rates of matrices shrink
    with the width.
    """
    from dtt.optim import eight_bit
    from dtt.optim.groups import Settings, rate_and_decay

    entry = entry or AdamWGroup(match=param.name)
    if entry.weight_decay is not None:
        weight_decay = entry.weight_decay
    elif param.role not in ("matrix", "router", "adapter"):
        weight_decay = 0.0
    lr, decay, cautious = rate_and_decay(entry.lr or given.lr, weight_decay, param, 1.0, run)
    small = given.state == "8bit" and eight_bit.has_8bit_state(param)
    return Settings(
        eight_bit.NAME if small else NAME,
        lr=lr,
        weight_decay=decay,
        cautious=cautious or None,
        betas=entry.betas or given.betas,
        eps=entry.eps or given.eps,
    )
