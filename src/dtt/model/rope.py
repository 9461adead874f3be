"""Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout.

Shapes: T tokens, H heads, K head_dim. The pair that rotates together is (x[i], x[i + K/2]).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 of the angle of each pair at each position: [T] → [T, K/2].

    Axes before T stay: positions that differ between sequences are [B, 1, T], for all their heads.

    Computed once per forward pass for all layers, not kept: a table would be a buffer that meta
    initialisation, sharding and checkpoints have to know about, to save a thousandth of a step.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles; computed in fp32, returned in `x`'s dtype."""
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BHTK)
