"""Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout.

Shapes: T tokens, H heads, K head_dim. Dimensions i and i + K/2 of a head form one rotated pair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtt.config.model import LinearRopeScaling, Llama3RopeScaling, NoRopeScaling, RopeScaling


def rotations(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[Tensor, Tensor]:
    """Return fp32 cosines and sines of each pair's angle at each position: [T] → [T, K/2].

    Leading axes are kept: positions that differ between sequences are [B, 1, T], where the 1
    broadcasts over heads.

    They are computed once per forward pass for all layers and not stored. A table would be a buffer
    that meta initialisation, sharding and checkpoints must handle, and would save only a thousandth
    of a step.
    """
    # In the order of operations of transformers, so that fp32 logits of Llama are equal bit for bit
    # (benchmarks/parity.py).
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = _scale(1.0 / theta**exponents, scaling)
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the frequencies [K/2], in radians per token, scaled for a longer context."""
    match scaling:
        case NoRopeScaling():
            return frequencies
        case LinearRopeScaling():
            return frequencies / scaling.factor
        case Llama3RopeScaling(low_freq_factor=low, high_freq_factor=high):
            # Full turns of each pair within the original context. Pairs with many turns encode
            # short distances and stay as they are. Slow ones are stretched, and those between are
            # blended, so that no frequency jumps.
            turns = frequencies * scaling.original_max_seq_len / (2 * math.pi)
            fast = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - fast) * frequencies / scaling.factor + fast * frequencies


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles, in fp32; return the result in the dtype of `x`."""
    # cos and sin are fp32, so the products are too, whatever the dtype of x.
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BHTK)
