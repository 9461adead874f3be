"""The product of a linear layer in fp8, with a scale for each row of both operands.

All three products of a layer, that of the forward pass and both gradients, are Y = A Bᵀ. Each row
of A and of B is divided by a scale that brings its largest value below the largest one of e4m3
(Micikevicius et al., arXiv 2209.05433), and the result is multiplied by both. So the gradients need
operands with other scales: the weight by input, and the gradient of the output and the input by
feature.

- Scales are powers of two. Dividing by one is exact, so the value of an element does not depend on
  its scale unless it is 2^14 times smaller than the largest one of its row. A weight has the same
  values in both passes, and on each rank of any layout, but for those small ones.
- With tensor parallelism, each rank scales what it has. Where the sum is over its own part (o, down
  and the gradients of the inputs of q, k, v, gate, up), its rows are parts of rows. The ranks' sums
  are added in bf16, as without fp8.
- A row with a number that is not finite becomes NaN, so that the anomaly guard sees it.
- Weights are scaled at each use, also frozen ones. Kept in fp8, a frozen weight would need both
  forms, which take as much memory as bf16. To scale one moves 3 bytes per weight: for 8,192 tokens
  6 % of the time of its product on an H100.

Shapes: M and N rows of the operands, K what the sum is over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

FP8 = torch.float8_e4m3fn
MULTIPLE = 16
"""K must be a multiple of this, and so must the rows of B."""
EXPONENT = 0x7F80_0000
"""Bits of the exponent of a fp32 number, which begins at bit 23."""
ABOVE_LARGEST = 0x1F_FFFF
"""Added to the bits of a number, this carries into the exponent if its mantissa is above 1.75. The
largest number of e4m3 is 448 = 1.75 · 2^8."""


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8 and the scales of its rows, [M, 1] in fp32: powers of two."""
    largest = x_MK.abs().amax(1, keepdim=True).float()
    # In integers: rounding of a logarithm could give a scale that is too small.
    exponent = ((largest.view(torch.int32) + ABOVE_LARGEST) & EXPONENT) - (8 << 23)
    scale = exponent.clamp(min=1 << 23).view(torch.float32)  # also of a row of zeros
    # Conversion to fp8 would make an infinite number 448, and the guard would not see it.
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (x_MK.float() / scale).to(FP8).contiguous(), scale


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return A Bᵀ in bf16, [M, N]."""
    (a, scales_a), (b, scales_b) = quantize(a_MK), quantize(b_NK)
    if not a.is_cuda:
        # A CPU has no scales by row in torch 2.11. Powers of two can be applied afterwards.
        one = torch.ones((), device=a.device)
        y = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)  # noqa: SLF001
        return (y * scales_a * scales_b.t()).bfloat16()
    # Fast accumulation: without it, the kernels for scales by row are hardly faster than bf16.
    return torch._scaled_mm(  # noqa: SLF001
        a, b.t(), scales_a, scales_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


class _Fp8Product(torch.autograd.Function):
    """X Wᵀ and its gradients; what is kept for the backward pass is in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(grad, weight.t())
        if ctx.needs_input_grad[1]:
            # The sum is over tokens. Rows of zeros make their number a multiple of 16.
            missing = -len(x) % MULTIPLE
            x, grad = (F.pad(matrix, (0, 0, 0, missing)) for matrix in (x, grad))
            of_weight = product(grad.t(), x.t())
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b like `F.linear`: under autocast in fp8, else in the dtype of x.

    With tensor parallelism, `weight` is a DTensor that is divided by outputs or by inputs.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)  # generation: one row for each text gains nothing
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = x.to(dtype), weight.to(dtype)
    if isinstance(weight, DTensor):
        assert isinstance(x, DTensor)
        y: Tensor = _divided(x, weight)
    else:
        y = _rows(x, weight)
    if bias is None:
        return y
    bias = bias.to(dtype)
    if isinstance(y, DTensor) and not y.placements[0].is_shard():
        assert isinstance(bias, DTensor)
        # Without communication: each rank adds its share to its summand, and has a summand of the
        # gradient.
        share = bias.to_local(grad_placements=[Partial()]) / y.device_mesh.size()
        bias = DTensor.from_local(share, y.device_mesh, [Partial()], run_check=False)
    return y + bias


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


def _divided(x: DTensor, weight: DTensor) -> DTensor:
    """Multiply this rank's part, as DTensor would, which has no rule for products in fp8."""
    by_outputs = weight.placements[0].is_shard(0)
    # All inputs times some outputs: this rank's gradient of the inputs is a summand.
    own = x.to_local(grad_placements=[Partial()]) if by_outputs else x.to_local()
    y = _rows(own, weight.to_local())
    placement: Placement = Shard(y.dim() - 1) if by_outputs else Partial()
    return DTensor.from_local(y, x.device_mesh, [placement], run_check=False)
