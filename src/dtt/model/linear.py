"""Linear and Embedding layers without default initialisation, and products sorted by expert.

`dtt.model.init` or a checkpoint sets their values. torch's own initialisation takes half a second
at startup for values that are overwritten, and three on the meta device, where the first random
number loads torch's decompositions.

Shapes: M rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

BLOCK = 64
"""Number of rows of which most products have a multiple, on a CPU in a 16-bit dtype."""


class Linear(nn.Linear):
    """`nn.Linear` without default initialisation."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """Function of the input, the weight and the bias; `dtt.parallel.fp8` sets its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b."""
        return self.product(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without default initialisation."""

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix, [M, I] → [M, O], in the autocast dtype.

    `ends_E` int32 holds the end (exclusive) of the rows of each expert, on the device of the rows.
    """
    kind = x_MI.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast knows neither operator below.
        dtype = torch.get_autocast_dtype(kind)
        x_MI, weight_EOI = x_MI.to(dtype), weight_EOI.to(dtype)
    aligned = not (x_MI.shape[1] % 8 or weight_EOI.shape[1] % 8)  # rows of multiples of 16 bytes
    if kind == "cuda" and x_MI.dtype == torch.bfloat16 and aligned:
        # One kernel, which reads the ends on the device: the host does not wait for them.
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    product: Tensor = torch.ops.dtt.grouped_linear(x_MI, weight_EOI, ends_E)
    return product


def _rows(ends_E: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, slice, bool]]:
    """Yield each expert that has rows, with its rows in one or two parts, and if it is the first.

    oneDNN generates code for each new shape of a product in a 16-bit dtype. With any number of rows
    nearly all shapes are new, and that takes seven times as long as the products. With a multiple
    of BLOCK rows, and a rest, few are. (A rest rounds the gradient of a weight once more.)
    """
    start, block = 0, BLOCK if dtype.itemsize == 2 else 1
    for e, end in enumerate(ends_E.tolist()):
        border = end - (end - start) % block
        if border > start:
            yield e, slice(start, border), True
        if end > border:
            yield e, slice(border, end), border == start
        start = end


def _product(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    # Into the memory of the result: to concatenate products would copy each once more.
    out_MO = x_MI.new_empty(len(x_MI), weight_EOI.shape[1])
    for e, rows, _ in _rows(ends_E, x_MI.dtype):
        torch.mm(x_MI[rows], weight_EOI[e].T, out=out_MO[rows])
    return out_MO


def _gradients(
    grad_MO: Tensor, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x_MI = torch.empty_like(x_MI)
    # Zeros, as experts without a token have a gradient too: 0.
    grad_weight_EOI = torch.zeros_like(weight_EOI)
    for e, rows, first in _rows(ends_E, x_MI.dtype):
        torch.mm(grad_MO[rows], weight_EOI[e], out=grad_x_MI[rows])
        # beta = 0 spares the reading of zeros.
        grad_weight_EOI[e].addmm_(grad_MO[rows].T, x_MI[rows], beta=0 if first else 1)
    return grad_x_MI, grad_weight_EOI


def _differentiate(ctx: Any, grad_MO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_MI, weight_EOI, ends_E = ctx.saved_tensors
    grads = torch.ops.dtt.grouped_linear_backward(grad_MO.contiguous(), x_MI, weight_EOI, ends_E)
    return *grads, None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


# Operators of their own, so that a compiler sees neither the loop nor the numbers of rows, which
# differ in every batch.
torch.library.define("dtt::grouped_linear", "(Tensor x, Tensor weight, Tensor ends) -> Tensor")
torch.library.define(
    "dtt::grouped_linear_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
)
for device in ("cpu", "cuda"):
    torch.library.impl("dtt::grouped_linear", device, _product)
    torch.library.impl("dtt::grouped_linear_backward", device, _gradients)
torch.library.register_fake(
    # Not `len(x)`, which would fix the number of rows in a graph.
    "dtt::grouped_linear",
    lambda x, weight, _ends: x.new_empty(x.shape[0], weight.shape[1]),
)
torch.library.register_fake(
    "dtt::grouped_linear_backward",
    lambda _grad, x, weight, _ends: (torch.empty_like(x), torch.empty_like(weight)),
)
register_flop_formula(torch.ops.dtt.grouped_linear)(
    lambda x, weight, _ends, **_: 2 * x[0] * prod(weight[1:])
)
register_flop_formula(torch.ops.dtt.grouped_linear_backward)(
    lambda _grad, x, weight, _ends, **_: 4 * x[0] * prod(weight[1:])
)
torch.library.register_autograd("dtt::grouped_linear", _differentiate, setup_context=_keep)
