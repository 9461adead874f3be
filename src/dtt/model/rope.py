"""Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout.

Shapes: T tokens, H heads, K head_dim, R rotated dimensions of a head (all, unless RoPE is partial).
Dimensions i and i + R/2 of a head form one rotated pair.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from dtt.config.model import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)


def rotations(
    positions: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling
) -> tuple[Tensor, Tensor]:
    """Return fp32 cosines and sines of each pair's angle at each position: [T] → [T, R/2].

    They are multiplied by the attention factor of the scaling, if it has one. Leading axes are
    kept: positions that differ between sequences are [B, 1, T], where the 1 broadcasts over heads.

    They are computed once per forward pass for all layers and not stored. A table would be a buffer
    that meta initialisation, sharding and checkpoints must handle, and would save only a thousandth
    of a step.
    """
    # In the order of operations of transformers, so that fp32 logits of Llama are equal bit for bit
    # (benchmarks/parity.py).
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
    frequencies = _scale(1.0 / theta**exponents, theta, scaling, positions)
    angles = positions.float()[..., None] * frequencies
    factor = _attention_factor(scaling)
    # Most scalings have none, and a product with 1 would still be two passes over the tables.
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def _attention_factor(scaling: RopeScaling) -> float:
    match scaling:
        case YarnRopeScaling(attention_factor=None, factor=factor):
            return 0.1 * math.log(max(1.0, factor)) + 1.0
        case YarnRopeScaling(attention_factor=float(given)):
            return given
        case LongRopeScaling(attention_factor=given):
            return given
        case _:
            return 1.0


def _scale(frequencies: Tensor, theta: float, scaling: RopeScaling, positions: Tensor) -> Tensor:
    """Return the frequencies in radians per token, scaled for a longer context.

    They have the shape [R/2], or with LongRoPE [T, R/2], because they depend on the document.
    """
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
        case YarnRopeScaling():
            slowed = _yarn_slowed(len(frequencies), theta, scaling, frequencies.device)
            return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)
        case LongRopeScaling(short_factor=short, long_factor=long):
            of_short, of_long = (_on(frequencies.device, factors) for factors in (short, long))
            is_long = document_lengths(positions) > scaling.original_max_seq_len
            return frequencies / torch.where(is_long[..., None], of_long, of_short)


@cache
def _on(device: torch.device, numbers: tuple[float, ...]) -> Tensor:
    """Return numbers in fp32 on a device; copied once, as each copy waits for all kernels."""
    # The first caller may generate, and a later one train.
    with torch.inference_mode(mode=False):
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def _yarn_slowed(
    pairs: int, theta: float, scaling: YarnRopeScaling, device: torch.device
) -> Tensor:
    """Return by how much YaRN slows each pair down, [R/2]: 0 for not at all, 1 for `factor`."""

    def pair_with(turns: float) -> float:
        """Return the fractional index of the pair with `turns` turns in the original context."""
        length = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return pairs * math.log(length) / math.log(theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is the index of a dimension, not of a pair, as in the published code.
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # Equal bounds would divide by 0.
    width = high - low if high != low else 0.001
    ramp = (torch.arange(pairs, device=device).float() - low) / width
    return ramp.clamp(0.0, 1.0)


def document_lengths(positions: Tensor) -> Tensor:
    """Return the length of the document of each token, [..., T], from its positions.

    A document ends where the next position is not higher.
    """
    index = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions[..., 1:] <= positions[..., :-1]
    # The running minimum from the right is the index of the end of the current document.
    last = torch.where(ends, index, positions.shape[-1]).flip(-1).cummin(dim=-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles, in fp32; return the result in the dtype of `x`."""
    # cos and sin are fp32, so the products are too, whatever the dtype of x. Dimensions beyond
    # theirs are not rotated.
    rotated, rest = x_BHTK[..., : 2 * cos.shape[-1]], x_BHTK[..., 2 * cos.shape[-1] :]
    a, b = rotated.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x_BHTK)
