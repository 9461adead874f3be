"""Normalisation layers over the last axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dtt.mesh.dtypes import wide
from dtt.model.architecture import Architecture


def make_norm(arch: Architecture, width: int) -> nn.Module:
    """Build the norm of the architecture, over a last axis of size `width`."""
    match arch.norm:
        case "layernorm":
            return nn.LayerNorm(width, eps=arch.norm_eps)
        case "rmsnorm":
            return RMSNorm(width, arch.norm_eps)
        case "rmsnorm_plus_one":
            return RMSNorm(width, arch.norm_eps, offset=1.0)


class RMSNorm(nn.RMSNorm):
    """RMSNorm x / rms(x) * (offset + weight), computed in fp32.

    Under autocast the input is bf16, in which the mean of squares would lose precision.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        """Create the weight; `eps` is added to the mean square."""
        super().__init__(width, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width] → [..., width], in the dtype of `x`."""
        # Added in fp32: a bf16 weight of less than 1/256 would vanish in 1 + weight.
        weight = wide(self.weight) + self.offset
        return F.rms_norm(wide(x), self.normalized_shape, weight, self.eps).type_as(x)
