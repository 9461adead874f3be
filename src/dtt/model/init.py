"""Initial weights: a pure function of (seed, parameter name), whatever the device or the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from dtt.model.decoder import Decoder

RESIDUAL_WRITERS = ("attn.o.weight", "mlp.down.weight")


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fill the parameters in place: normal(0, init_std); what writes into the residual stream
    divided by sqrt(2 * n_layers) (GPT-2, section 2.3); norms 1; biases 0."""
    arch = model.arch
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = arch.init_std
        if name.endswith(RESIDUAL_WRITERS):
            std /= math.sqrt(2 * arch.n_layers)
        parameter.copy_(_normal(parameter, std, seed, name))


def _normal(like: nn.Parameter, std: float, seed: int, name: str) -> torch.Tensor:
    """Draw on the CPU, where a generator gives the same numbers for every kind of device."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(like.shape, dtype=torch.float32, device="cpu").normal_(
        0.0, std, generator=generator
    )
