"""Language modelling as a variant of the section `objective`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dtt.config.objective import Objective

if TYPE_CHECKING:  # keeps torch out of the check of a configuration
    from torch import Tensor

    from dtt.data.samples.loader import MicroBatch


class NextTokenConfig(Objective):
    """Language modelling: the cross-entropy of the next token, as mean over the targets."""

    needs = "sum"
    type: Literal["next_token"] = "next_token"

    def loss(self, out: Tensor, batch: MicroBatch) -> Tensor:
        """Return the sum, as the model has computed it."""
        return out
