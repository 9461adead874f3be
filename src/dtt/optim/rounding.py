"""Stochastic rounding of fp32 to bf16, which preserves small updates on average."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_BITS = 16
"""Number of low bits of an fp32 number that bf16 drops."""
SLOWEST_TO_NEAREST = 0.95
"""Largest decay of a running average in bf16 that is rounded to nearest.

A step moves the average by 1 - decay of its distance to the new value. Rounded to nearest, it stops
where that is half a unit in the last place: with 0.95 up to 8 % beside the mean, with 0.99 up to
39 %, and with 0.999 it never falls at all. Other decays are rounded stochastically; the random
numbers double the time of such a step on a CPU.
"""


@dataclass
class StochasticRounding:
    """Rounding up or down at random, with probabilities that make the expected value exact.

    bf16 has 8 significant bits: rounded to nearest, a change of a weight by less than 1/512 of it
    is lost, in every step again (Zamirai et al., arXiv 2010.06192). The random bits are a function
    of the seed, the step and the weight's name and offset, so that all its replicas round equally,
    and a resumed run draws the same bits as an uninterrupted one.
    """

    seed: int
    step: int = 0
    """Step of the run; set before each step of the optimizers."""
    weights: bool = True
    """False if only running averages of a slow decay are rounded so, and weights to nearest."""

    @classmethod
    def of(cls, seed: int, dtype: torch.dtype, *, weights: bool) -> StochasticRounding | None:
        """Return the rounding of a run whose weights have this dtype; None if it is not bf16."""
        return cls(seed, weights=weights) if dtype == torch.bfloat16 else None

    def write(self, target: Tensor, value: Tensor, key: str) -> None:
        """Round `value` (fp32) into `target` (bf16, of the same shape).

        `key` names the tensor and selects its random bits. Numbers that bf16 represents exactly,
        infinity and NaN are copied unchanged.
        """
        # Integer arithmetic on the bits: adding noise below bit 16 and cutting rounds up with
        # exactly the probability of the cut part.
        bits = value.contiguous().view(torch.int32)
        # On the device of the tensor. CPU and GPU draw different numbers, so runs repeat on one
        # kind of device only.
        generator = self._generator(bits.device, key)
        noise = torch.empty_like(bits).random_(0, 1 << LOW_BITS, generator=generator)
        # Where the sum carries into the high bits, the number moves away from zero whatever its
        # sign, because fp32 stores sign and magnitude.
        rounded = noise.add_(bits).bitwise_and_(-1 << LOW_BITS).view(torch.float32)
        # Noise added to the bits of infinity would make it NaN.
        target.copy_(torch.where(value.isfinite(), rounded, value))

    def _generator(self, device: torch.device, key: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}:{self.step}:{key}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big", signed=True)
        return torch.Generator(device).manual_seed(seed)
