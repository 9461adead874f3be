"""Initial weights: a pure function of (seed, parameter name), whatever the device or the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

RESIDUAL_WRITERS = ("attn.o.weight", "mlp.down.weight")


@torch.no_grad()
def initialize(model: Decoder, seed: int, base: Architecture | None = None) -> None:
    """Fill the parameters in place: matrices normal, norms the identity, biases 0.

    `base`: the model whose spread is kept, as `dtt.model.scaling` has it; None: the model's own.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            zero = name.endswith("bias") or model.arch.norm == "rmsnorm_plus_one"
            parameter.fill_(0.0 if zero else 1.0)
        else:
            std = init_std(name, model.arch, base or model.arch)
            parameter.copy_(_normal(parameter, std, seed, name))


def init_std(name: str, arch: Architecture, base: Architecture) -> float:
    """Standard deviation of a parameter with two dimensions.

    `init_std` for embeddings and head. Hidden matrices get that over the root of the width, counted
    in widths of the base; those that write into the residual stream get this over sqrt(2 * layers
    of the base) (GPT-2, section 2.3).
    """
    if not name.startswith("layers."):
        return arch.init_std
    std = arch.init_std * math.sqrt(base.dim / arch.dim)
    return std / math.sqrt(2 * base.n_layers) if name.endswith(RESIDUAL_WRITERS) else std


def _normal(like: nn.Parameter, std: float, seed: int, name: str) -> torch.Tensor:
    """Draw on the CPU, where a generator gives the same numbers for every kind of device."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(like.shape, dtype=torch.float32, device="cpu").normal_(
        0.0, std, generator=generator
    )
