"""The values that weights have in 4 bits."""

from __future__ import annotations

from torch import Tensor

from dtt.model.nf4 import dequantize, pair_levels, quantize, scale_levels


def rounded(weight: Tensor) -> Tensor:
    """Return a matrix with the values that it has after quantisation."""
    return dequantize(quantize(weight), pair_levels(), scale_levels(), weight.dtype)
