"""Weight initialisation: a pure function of (seed, parameter name).

The values do not depend on the device or on how parameters are sharded.
"""

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
"""Maximum number of elements drawn from one generator."""


@torch.no_grad()
def initialize(model: Decoder, seed: int, base: Architecture | None = None) -> None:
    """Initialise the parameters in place: matrices normal, norms to the identity, biases to 0.

    `base` is the model whose standard deviations are used, as in `dtt.model.scaling`; None: `model`
    itself.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            zero = name.endswith("bias") or model.arch.norm == "rmsnorm_plus_one"
            local(parameter).fill_(0.0 if zero else 1.0)
        else:
            std = init_std(name, model.arch, base or model.arch)
            _fill_normal(parameter, std, seed, name)


def init_std(name: str, arch: Architecture, base: Architecture) -> float:
    """Return the standard deviation for a two-dimensional parameter.

    It is `init_std` for embeddings and the head. For hidden matrices it is `init_std` / sqrt(dim /
    base dim). Matrices that write into the residual stream divide this by sqrt(2 * layers of the
    base) (GPT-2, section 2.3).
    """
    if not name.startswith("layers."):
        return arch.init_std
    std = arch.init_std * math.sqrt(base.dim / arch.dim)
    return std / math.sqrt(2 * base.n_layers) if name.endswith(RESIDUAL_WRITERS) else std


def _fill_normal(parameter: nn.Parameter, std: float, seed: int, name: str) -> None:
    """Fill a parameter with normal numbers, drawn on the CPU and copied to its device.

    A CPU generator gives the same numbers for every kind of device. Rows are drawn in blocks, each
    with its own generator: a rank that holds a shard of the parameter draws only the blocks that
    overlap it.
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
