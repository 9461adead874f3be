"""A loss of your own: `dtt train -c examples/focal.yaml`."""

from typing import Any

import torch
from torch import Tensor

import dtt


class Focal(dtt.Objective):
    """Cross-entropy with less weight on targets that are easy (arXiv 1708.02002)."""

    gamma: float = 1.0
    """Exponent of the weight (1 - p) of a target with probability p; 0: the cross-entropy."""

    def loss(self, out: Tensor, batch: dtt.MicroBatch) -> Any:
        """Return the sum over the targets."""
        return ((1 - torch.exp(-out)) ** self.gamma * out).sum()
