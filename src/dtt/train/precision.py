"""Precision of a run: dtypes of weights and computation.

- `bf16` is autocast over fp32 weights. The residual stream is bf16 on every layout: embeddings
  are cast at the lookup, as FSDP2's gathered weights produce them. So the loss curves of one
  device, DDP and FSDP2 are comparable, and their first losses are equal to the last bit.
  torchtitan and nanochat train well without an fp32 residual stream, which would take twice the
  memory and bandwidth.
- `fp32` keeps the residual stream in fp32.
- `bf16-pure` stores weights, gradients and optimizer state in bf16, without autocast. An update
  smaller than 1/512 of a weight is then lost, unless `train.stochastic_rounding` rounds new
  weights up or down with probabilities that preserve the mean (`optim/rounding.py`). The random
  numbers depend on the seed, the step, and the name and index of a weight, so replicas stay equal
  and a resume is exact. Moments whose decay is above 0.95 are always rounded so: to nearest, they
  would stop far from their mean, and with 0.999 never fall.
- `optim.state=8bit` (`optim/adamw_optimizers.py`) computes steps of AdamW in fp32 and keeps the
  moments of large matrices as codes of a byte (page).
- `fp8` (`parallel/fp8.py`) is `bf16` with products in fp8 of those linear layers whose forward and
  backward pass a benchmark at the start measures as faster. On a CPU, there are none.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import torch

from dtt.mesh.dist import native_bf16


class Precision(StrEnum):
    """Values of `train.precision`, with `auto` resolved."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    PURE_BF16 = "bf16-pure"
    FP8 = "fp8"

    @property
    def weights(self) -> torch.dtype:
        """Dtype of parameters, of their gradients and of optimizer state."""
        match self:
            case Precision.FP64:
                return torch.float64
            case Precision.PURE_BF16:
                return torch.bfloat16
            case _:
                return torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products, except those in fp8."""
        # fp32 stays fp32 on a GPU: torch.backends' TF32 is never enabled. It would be several times
        # as fast, with 10 bits of mantissa under a name that promises 23; bf16 is faster still.
        return self.weights if self in (Precision.FP32, Precision.FP64) else torch.bfloat16


def choose(
    asked: Literal["auto", "fp64", "fp32", "bf16", "bf16-pure", "fp8"], device: torch.device
) -> Precision:
    """Resolve `asked`; `auto` is bf16 where `device` supports it natively, else fp32."""
    if asked == "auto":
        return Precision.BF16 if native_bf16(device) else Precision.FP32
    return Precision(asked)
