"""Parameters whose moments AdamW keeps in 8 bits, and the size of their state."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # keeps torch out of the check of a configuration
    from dtt.params.table import Param

NAME = "adamw8bit"
"""Name of their optimizer in checkpoints: state of 32 bits is another's, and never taken for it."""
BLOCK = 256
"""Weights of a row that share a scale; the last block of a row may have fewer."""
LEAST = 4096
"""Weights of the smallest parameter: in smaller ones nothing is saved."""


def has_8bit_state(param: Param) -> bool:
    """Return True for matrices, an untied head and adapters.

    A few rows of an embedding have gradients in a step, and most of the others none: their moments
    differ by more than 8 bits hold (Dettmers et al., section 2.3).
    """
    shape = param.layout.shape
    wide = param.role in ("matrix", "head", "adapter") and len(shape) > 1
    return wide and prod(shape) >= LEAST


def blocks_of(shape: Sequence[int]) -> int:
    """Return the number of blocks in each row of a parameter."""
    return -(-shape[-1] // BLOCK)
