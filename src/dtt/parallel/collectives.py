"""Exchanges of tensors between processes that gradients go back through."""

from __future__ import annotations

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
    whole: Tensor = _Gather.apply(part, dim, group)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        """All-gather."""
        ctx.dim, ctx.group = dim, group
        part = part.movedim(dim, 0).contiguous()
        whole = _ops.all_gather_into_tensor(part, group.size(), group.group_name)
        return _ops.wait_tensor(whole).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce-scatter."""
        whole = grads[0].movedim(ctx.dim, 0).contiguous()
        size, name = ctx.group.size(), ctx.group.group_name
        part = _ops.wait_tensor(_ops.reduce_scatter_tensor(whole, "sum", size, name))
        return part.movedim(0, ctx.dim), None, None
