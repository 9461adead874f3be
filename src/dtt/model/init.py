"""Initial weights: a pure function of (seed, parameter name), whatever the device or the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.runtime.sharding import held, local

RESIDUAL_WRITERS = ("attn.o.weight", "mlp.down.weight")
BLOCK_ELEMENTS = 2**24
"""Numbers drawn with one generator."""


@torch.no_grad()
def initialize(model: Decoder, seed: int, base: Architecture | None = None) -> None:
    """Fill the parameters in place: matrices normal, norms the identity, biases 0.

    `base`: the model whose spread is kept, as `dtt.model.scaling` has it; None: the model's own.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            zero = name.endswith("bias") or model.arch.norm == "rmsnorm_plus_one"
            local(parameter).fill_(0.0 if zero else 1.0)
        else:
            std = init_std(name, model.arch, base or model.arch)
            _fill_normal(parameter, std, seed, name)


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


def _fill_normal(parameter: nn.Parameter, std: float, seed: int, name: str) -> None:
    """Draw on the CPU, where a generator gives the same numbers for every kind of device.

    Rows come in blocks, each with a generator of its own: a process that holds a part of the
    parameter draws the blocks that this is in, and no others.
    """
    part, box, (rows, columns) = held(parameter)[:3]
    height = max(1, BLOCK_ELEMENTS // columns)
    (first, left), (count, width) = box
    for start in range(first // height * height, first + count, height):
        shape = min(height, rows - start), columns
        drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
        drawn.normal_(0.0, std, generator=_generator(f"{seed}:{name}", start // height))
        begin, end = max(first, start), min(first + count, start + len(drawn))
        part[begin - first : end - first] = drawn[begin - start : end - start, left : left + width]


def _generator(key: str, block: int) -> torch.Generator:
    digest = hashlib.sha256((f"{key}:{block}" if block else key).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
