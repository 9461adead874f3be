"""The choice of the next token from logits.

Shapes: B sequences, V vocabulary, W columns of random numbers: V, or `top_k` if it is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtt.base.errors import Diverged

NAN, INFINITE = -1, -2
"""What `SamplingRule.pick` returns in place of a token if the largest logit is NaN, or +inf."""


@dataclass(frozen=True)
class SamplingRule:
    """How a token is chosen: at temperature 0 the most likely one, else at random.

    It is then drawn from the smallest set of the `top_k` most likely tokens whose probability
    reaches `top_p`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def width(self, vocabulary: int) -> int:
        """Return W, the number of random numbers that a token takes; 0 at temperature 0."""
        return 0 if self.temperature == 0 else min(self.top_k or vocabulary, vocabulary)

    def pick(self, logits_BV: Tensor, noise_BW: Tensor) -> Tensor:
        """Return a token id for each row, [B], or NAN or INFINITE.

        `noise_BW` are exponentially distributed. Nothing here waits for the device or draws random
        numbers, so that a CUDA graph can hold it.
        """
        logits_BV = logits_BV.float()
        highest_B1 = logits_BV.amax(dim=-1, keepdim=True)
        finite_B1 = highest_B1.isfinite()  # the maximum is NaN if any logit is
        if self.temperature == 0:
            token_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        else:
            # Finite at any temperature, except for -inf.
            logits_BV = ((logits_BV - highest_B1) / self.temperature).where(finite_B1, 0.0)
            ids_BW = None
            if self.top_k is not None or self.top_p < 1.0:  # sorting takes longer than drawing
                logits_BV, ids_BW = logits_BV.topk(noise_BW.shape[1])
            weights_BW = logits_BV.softmax(dim=-1)
            if ids_BW is not None:
                # A token is dropped if those before it reach top_p; the most likely one never is.
                # Of the sums themselves: `sum - weight` is not the sum before it, as floats round.
                reached_BW = weights_BW.cumsum(dim=-1)[:, :-1] >= self.top_p
                weights_BW[:, 1:] = weights_BW[:, 1:].masked_fill(reached_BW, 0.0)
            # The largest of weights over exponential numbers is distributed as the weights are
            # (Efraimidis and Spirakis, 2006). `torch.multinomial` computes the same, to the bit,
            # but draws the numbers itself, for one generator a call.
            token_B1 = (weights_BW / noise_BW).argmax(dim=-1, keepdim=True)
            if ids_BW is not None:
                token_B1 = ids_BW.gather(1, token_B1)
        failure_B1 = torch.where(highest_B1.isnan(), NAN, INFINITE)
        return token_B1.where(finite_B1, failure_B1)[:, 0]


def fill_noise(noise_BW: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Fill each row of `noise_BW` from its own generator, in place, and return it.

    Each row has its own generator, so that its text does not depend on the other rows.
    """
    if noise_BW.shape[1]:
        for noise_W, generator in zip(noise_BW, generators, strict=True):
            noise_W.exponential_(generator=generator)
    return noise_BW


def checked(token: int) -> int:
    """Return a token that `pick` chose; raise Diverged if the logits were not finite."""
    if token >= 0:
        return token
    raise Diverged(
        "the model's logits are not finite",
        why=f"the largest logit is {'nan' if token == NAN else 'inf'}",
        next="use weights from before training diverged: dtt export JOB@STEP",
    )
