"""Frozen linear layers in 4 bits: NormalFloat with double quantisation (QLoRA, arXiv 2305.14314).

The values are those of bitsandbytes for blocks of 64, bit for bit. torchao's NF4 tensor has others:
its second quantisation is linear, and under FSDP2 each rank has a mean of its own.

Shapes: D features of the input, F features of the output, C = ceil(F D / 16384).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.mesh.sharding import FullTensor, local_shard
from dtt.model.linear import Linear

BLOCK, SCALES = 64, 256
"""Weights of a block, which have one scale, and scales that are quantised together."""
CODES_OF, SCALES_OF = ".nf4_codes", ".nf4_scales"
"""Ends of the names of the parameters that hold a quantised weight."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of a weight, in units of its block's scale (QLoRA, appendix E)."""


class Quantized(NamedTuple):
    """A matrix [F, D] in 4.13 bits per weight."""

    codes: Tensor
    """Two weights a byte, [F, D / 2]."""
    scales: Tensor
    """The scale of each block as a code of `scale_levels`, [F, D / 64]."""
    factors: Tensor
    """Factor of the decoded scales of 256 blocks, fp32 [C]."""
    mean: Tensor
    """Mean of all scales, which the decoded ones are added to, fp32 []."""


def scale_levels() -> Tensor:
    """Return the 256 values of a scale: the dynamic 8-bit type (Dettmers, arXiv 1511.04561)."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        means = (bounds[:-1] + bounds[1:]) / 2
        values += [10 ** (i - 6) * means, -(10 ** (i - 6)) * means]
    return torch.cat(values).sort().values


def pair_levels() -> Tensor:
    """Return the two weights of each byte, [256, 2]."""
    levels = torch.tensor(LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


def quantize(weight: Tensor) -> Quantized:
    """Quantise a matrix on the CPU; its rows have whole blocks."""
    codes, absmax = _nearest(weight.float(), torch.tensor(LEVELS), BLOCK)
    codes = codes.view(len(weight), -1)
    # One thread: several add the scales in another order for each number of threads, and a resume
    # on another layout would have other weights.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mean = absmax.mean()
    torch.set_num_threads(threads)
    scales, factors = _nearest(absmax - mean, scale_levels(), SCALES)
    return Quantized(
        codes[:, ::2] << 4 | codes[:, 1::2], scales.view(len(weight), -1), factors, mean
    )


def _nearest(values: Tensor, levels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the code of the nearest level for each value, and the largest one of each block."""
    flat = values.flatten()
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    # The reciprocal, as bitsandbytes has it: the quotient would round to another level at times.
    scaled = (blocks * (1 / largest.clamp(min=1e-38))[:, None]).flatten()[: len(flat)]
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8), largest


def dequantize(matrix: Quantized, pairs: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [F, D], computed in fp32 and rounded once."""
    decoded = F.embedding(matrix.scales.flatten().int(), levels[:, None]).squeeze(1)
    factors = matrix.factors.repeat_interleave(SCALES)[: len(decoded)]
    scales = (decoded * factors + matrix.mean).view(-1, 1)
    weights = F.embedding(matrix.codes.int(), pairs).view(-1, BLOCK)
    # In place: a second copy in fp32 would be the largest tensor of a step with little else.
    return weights.mul_(scales).to(dtype).view(len(matrix.codes), -1)


class _Product(torch.autograd.Function):
    """W x + b, which keeps 4 bits of each weight for the backward pass instead of 16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        *matrix, pairs, levels = parts
        weight = dequantize(Quantized(*matrix), pairs, levels, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *matrix, pairs, levels = ctx.saved_tensors
        weight = dequantize(Quantized(*matrix), pairs, levels, grads[0].dtype)
        return grads[0] @ weight, None, *(None for _ in ctx.saved_tensors)


class FrozenLinear(Linear):
    """A linear layer that takes over the weight and the bias of another: [..., D] → [..., F]."""

    def __init__(self, base: nn.Linear) -> None:
        """Take over the parameters of `base`."""
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias


class Nf4Linear(FrozenLinear):
    """A frozen linear layer whose weight is quantised when it is read: [..., D] → [..., F]."""

    factors: Tensor
    mean: Tensor
    pairs: Tensor
    levels: Tensor

    def __init__(self, base: nn.Linear) -> None:
        """Take over the bias of `base`, and its weight without the values."""
        super().__init__(base)
        rows, columns = base.weight.shape
        self.dtype, shape = base.weight.dtype, (rows, columns // BLOCK)
        empty = partial(torch.empty, device=base.weight.device, dtype=torch.uint8)
        # FSDP2 shards and gathers bytes as other parameters, and casts none of them.
        del self._parameters["weight"]
        self.nf4_codes = nn.Parameter(empty(rows, columns // 2), requires_grad=False)
        self.nf4_scales = nn.Parameter(empty(shape), requires_grad=False)
        # Whole on each rank: 256 blocks need not end with a row. They take 1/2,300 of the memory.
        groups = -(-shape[0] * shape[1] // SCALES)
        for name, tensor in (
            ("factors", torch.zeros(groups)),
            ("mean", torch.zeros(())),
            ("pairs", pair_levels()),
            ("levels", scale_levels()),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b in the dtype that `base` had."""
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x.to(self.dtype), self.bias, *self._parts()
        )
        return product

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the dtype that `base` had, for models that multiply with it themselves."""
        # As Mamba and Jamba do with `dt_proj`. Autograd then keeps it for the backward pass.
        *matrix, pairs, levels = self._parts()
        return dequantize(Quantized(*matrix), pairs, levels, self.dtype)

    def _parts(self) -> tuple[Tensor, ...]:
        buffers = (self.factors, self.mean, self.pairs, self.levels)
        return self.nf4_codes, self.nf4_scales, *buffers

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return self.out_features, self.in_features

    @torch.no_grad()
    def fill(self, full: FullTensor) -> None:
        """Quantise `full`, and keep this rank's rows."""
        # All of it on each rank, as the mean is that of all scales: one matrix at a time.
        matrix = quantize(full[()])
        ours = self.nf4_codes, self.nf4_scales
        for parameter, values in zip(ours, (matrix.codes, matrix.scales), strict=True):
            part = local_shard(parameter)
            part.local.copy_(values[part.box.slices])
        self.factors.copy_(matrix.factors)
        self.mean.copy_(matrix.mean)


def frozen_weights(model: nn.Module) -> dict[str, Tensor | Nf4Linear]:
    """Return what takes each frozen weight of a model: a parameter, or a quantised layer."""
    found: dict[str, Tensor | Nf4Linear] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and not name.endswith((CODES_OF, SCALES_OF))
    }
    layers = model.named_modules()
    return found | {f"{n}.weight": layer for n, layer in layers if isinstance(layer, Nf4Linear)}
