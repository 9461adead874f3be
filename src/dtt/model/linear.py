"""Linear and Embedding layers without default initialisation.

`dtt.model.init` or a checkpoint sets their values. torch's own initialisation takes half a second
at startup for values that are overwritten, and three on the meta device, where the first random
number loads torch's decompositions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without default initialisation."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """Function of the input, the weight and the bias; `dtt.parallel.fp8` sets its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b."""
        return self.product(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without default initialisation."""

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""
