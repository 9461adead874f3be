"""The dtype of sums and of other numbers that must be exact: at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return fp32, or fp64 for an fp64 tensor: a run that verifies a layout computes in fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or as it is if it is in fp64."""
    return x.to(wide_dtype(x))
