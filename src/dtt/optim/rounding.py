"""Rounding fp32 to bf16 so that what is too small to show is not lost on average."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_BITS = 16
"""Of an fp32 number, that bf16 has no room for."""


@dataclass
class StochasticRounding:
    """Up or down at random, with odds that make the mean the number itself.

    bf16 has 8 bits for a weight: rounded to nearest, a change of less than its 512th part leaves it
    as it was, in every step alike (Zamirai et al., arXiv 2010.06192). What is drawn is a function
    of the seed, the step and the weight's name and place: all that hold a copy of it round alike,
    and a run that goes on draws what it would have drawn.
    """

    seed: int
    step: int = 0
    """Of the run; set before each step of the optimizers."""

    def write(self, target: Tensor, value: Tensor, key: str) -> None:
        """Put `value` (fp32) into `target` (bf16, of the same shape); `key` names what it is.

        Numbers that bf16 holds, infinity and NaN stay what they are.
        """
        bits = value.contiguous().view(torch.int32)
        generator = self._generator(bits.device, key)
        noise = torch.empty_like(bits).random_(0, 1 << LOW_BITS, generator=generator)
        # Both signs move away from zero where the sum carries: an fp32 is sign and magnitude.
        rounded = noise.add_(bits).bitwise_and_(-1 << LOW_BITS).view(torch.float32)
        target.copy_(torch.where(value.isfinite(), rounded, value))

    def _generator(self, device: torch.device, key: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}:{self.step}:{key}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big", signed=True)
        return torch.Generator(device).manual_seed(seed)
