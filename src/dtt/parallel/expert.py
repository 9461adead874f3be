"""Expert parallelism: ranks that share the experts of every mixture (GShard, arXiv 2006.16668).

Each of P ranks has E / P experts, whole ones. It sends each row to the rank of its expert, and gets
the result back: two all-to-alls of rows in each pass, and one of their numbers.

Shapes as in `dtt.model.experts`; M rows of this rank's tokens, R rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dtt.mesh.mesh import Mesh
from dtt.model.experts import Compute, Experts, inverse, permuted, routers


def shard_experts(
    experts: Experts, layout: Mesh, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Divide experts over the ranks of `layout.experts`, in place.

    Each rank has whole experts as long as there are enough; else FSDP2 divides matrices.
    """
    mesh = layout.experts
    assert mesh is not None
    names, own = mesh.mesh_dim_names or (), experts.experts
    if "expert" in names:
        ranks = mesh["expert"]
        for name, stack in list(experts.named_parameters()):
            # None: ranks have equal weights or none yet, so rank 0 need not send its own.
            part = distribute_tensor(stack, ranks, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, stack.requires_grad))
        experts.exchange = RowExchange(ranks.get_group(), ranks.size())
        own //= ranks.size()
    shards = mesh["expert_shard"].size()

    def placement(stack: nn.Parameter) -> Shard | None:
        # Some ranks would have no expert, and others memory for more than their share.
        divides = own < shards and stack.shape[1] % shards == 0
        return Shard(1) if divides else None

    dims = tuple(name for name in names if name != "expert")
    fully_shard(
        experts,
        mesh=mesh[dims if len(dims) > 1 else dims[0]],
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=placement,
    )
    # Not `set_gradient_divide_factor`: where FSDP2 has one rank, torch 2.13 divides by it twice.
    # `dtt.params.table.Params.align` scales the gradients.


def share_sequences(model: nn.Module, layout: Mesh) -> None:
    """Tell the routers of a Decoder which ranks have other tokens of its sequences, if any do."""
    own = routers(model)
    if own and layout.size("context", "tensor") > 1:
        group = layout.group("context", "tensor")
        for router in own.values():
            router.group = group


@dataclass(frozen=True)
class RowExchange:
    """The exchange of rows among the ranks of `group`."""

    group: ProcessGroup
    size: int

    # Lengths differ in every batch: a compiler would wait for them too, and compile for each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """Return the results for the rows, `counts_E` for each expert."""
        # [P, E / P]: the numbers of rows that each rank sends to the experts of this one.
        received_PE = torch.empty_like(counts_E).view(self.size, -1)
        dist.all_to_all_single(received_PE, counts_E.view(self.size, -1), group=self.group)
        # The one wait of the host in a pass of a layer: only the lengths of buffers depend on it.
        sent_P, got_P = torch.stack(
            [counts_E.view(self.size, -1).sum(1), received_PE.sum(1)]
        ).tolist()
        rows_RD = _exchanged(rows_MD, sent_P, got_P, self.group)
        # They arrive by rank, and within it by expert.
        # Of 16 bits, which are sorted in a quarter of the passes.
        own_E = torch.arange(received_PE.shape[1], dtype=torch.int16, device=rows_RD.device)
        of_expert_R = own_E.repeat(self.size)
        expert_R = of_expert_R.repeat_interleave(received_PE.flatten(), output_size=len(rows_RD))
        order_R = expert_R.argsort(stable=True)
        place_R = inverse(order_R)
        out_RD = compute(permuted(rows_RD, order_R, place_R, 1), received_PE.sum(0))
        return _exchanged(permuted(out_RD, place_R, order_R, 1), got_P, sent_P, self.group)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], got: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.back = got, sent, group
        return _all_to_all(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], *ctx.back), None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], got: Sequence[int], group: ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), list(got), list(sent), group=group)
    return received


_exchanged: Callable[[Tensor, Sequence[int], Sequence[int], ProcessGroup], Tensor] = (
    _Exchanged.apply
)
