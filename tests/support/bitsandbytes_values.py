"""Values of a matrix in 4 bits as bitsandbytes defines them."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor


def of_bitsandbytes(weight: Tensor) -> Tensor:
    """Return a matrix after nf4 with double quantisation in blocks of 64."""
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    # What `compress_statistics` does, but with the nearest code for each scale, as the kernel for
    # GPUs has. That for fp32 on CPUs looks codes up in a table, and misses 2 of 1,000 by one.
    state.offset = state.absmax.mean()
    levels, operators = functional.create_dynamic_map(), torch.ops.bitsandbytes
    shifted = (state.absmax - state.offset).double()
    state.absmax, factors = operators.quantize_blockwise(shifted, levels, 256)
    more: dict[str, Any] = {"code": levels, "blocksize": 256, "dtype": torch.float32}
    state.nested, state.state2 = True, functional.QuantState(factors, **more)
    return functional.dequantize_4bit(codes, state)
