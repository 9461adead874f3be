"""Collectives that support autograd and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# In eager mode these equal the functions of torch.distributed, but torch.compile can trace them.
_ops = torch.ops._c10d_functional  # noqa: SLF001


def gather(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather the tensors of all ranks of `group`, concatenated along `dim`.

    The backward pass is a reduce-scatter: each rank gets the sum over ranks of the gradients of its
    part.
    """
    apply: Callable[..., Tensor] = _Gather.apply
    return apply(part, dim, group)


def total(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks of `group`, without a gradient; None: this rank alone."""
    if group is None:
        return part
    summed: Tensor = _ops.wait_tensor(_ops.all_reduce(part.detach(), "sum", group.group_name))
    return summed


def arrived(tensor: Tensor) -> Tensor:
    """Return `tensor` once its collective has finished; a GPU waits on its stream, not the host."""
    result: Tensor = _ops.wait_tensor(tensor)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        """All-gather along `dim`."""
        ctx.dim, ctx.group = dim, group
        # The collective concatenates along dimension 0. Moving `dim` there costs a copy unless it
        # is 0.
        part = part.movedim(dim, 0).contiguous()
        size, name = group.size(), group.group_name
        gathered: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(part, size, name))
        return gathered.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce-scatter the gradient along `dim`."""
        # The gradient of a concatenation is its slice, and ranks used all slices: their sum is the
        # reduce-scatter. An all-reduce would move twice the bytes.
        grad = grads[0].movedim(ctx.dim, 0).contiguous()
        size, name = ctx.group.size(), ctx.group.group_name
        part = _ops.wait_tensor(_ops.reduce_scatter_tensor(grad, "sum", size, name))
        return part.movedim(0, ctx.dim), None, None
