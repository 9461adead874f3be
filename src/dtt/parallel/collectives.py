"""Exchanges of tensors between processes that gradients go back through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# In eager mode the same as those of torch.distributed; but torch.compile takes them in its graph.
_ops = torch.ops._c10d_functional  # noqa: SLF001


def gather(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks of `group` one after another along `dim`, on each of them.

    Its gradient is that of the sum over ranks: each rank gets what all of them say of its part.
    """
    apply: Callable[..., Tensor] = _Gather.apply
    return apply(part, dim, group)


def arrived(tensor: Tensor) -> Tensor:
    """`tensor`, once the exchange that makes it is over; a GPU waits for it, not the host."""
    whole: Tensor = _ops.wait_tensor(tensor)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        """All-gather."""
        ctx.dim, ctx.group = dim, group
        part = part.movedim(dim, 0).contiguous()
        size, name = group.size(), group.group_name
        whole: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(part, size, name))
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce-scatter."""
        whole = grads[0].movedim(ctx.dim, 0).contiguous()
        size, name = ctx.group.size(), ctx.group.group_name
        part = _ops.wait_tensor(_ops.reduce_scatter_tensor(whole, "sum", size, name))
        return part.movedim(0, ctx.dim), None, None
