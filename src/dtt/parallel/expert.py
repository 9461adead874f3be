"""Expert parallelism: ranks that share the experts of every mixture (GShard, arXiv 2006.16668).

Each of P ranks has E / P experts, whole ones. It sends each row to the rank of its expert, and gets
the result back: two all-to-alls of rows in each pass, one of their weights, and one of their
numbers. The shared expert computes while rows travel to the experts.

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
from dtt.model.experts import Compute, Experts, inverse, routers, sorted_rows


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

    def __call__(
        self, rows_MD: Tensor, weights_M: Tensor, counts_E: Tensor, compute: Compute
    ) -> Callable[[], Tensor]:
        """Send the rows, `counts_E` for each expert, and their weights.

        Return a function that computes the rows that this rank receives, and returns the results
        for its own. What is computed before it is called overlaps with the communication, and so
        does its backward pass.
        """
        # [P, E / P]: the numbers of rows that each rank sends to the experts of this one.
        received_PE = torch.empty_like(counts_E).view(self.size, -1)
        dist.all_to_all_single(received_PE, counts_E.view(self.size, -1), group=self.group)
        # The one wait of the host in a pass of a layer, for lengths of buffers. Without it, each
        # rank would need room for the rows of all: P times as many as it has on average.
        sent_P, got_P = torch.stack(
            [counts_E.view(self.size, -1).sum(1), received_PE.sum(1)]
        ).tolist()
        there, back = (sent_P, got_P), (got_P, sent_P)
        rows, weights = (_Transfer(*there, self.group) for _ in range(2))
        rows_RD, weights_R = _sent(rows_MD, rows), _sent(weights_M, weights)
        # They arrive by rank, and within it by expert.
        # Of 16 bits, which are sorted in a quarter of the passes.
        own_E = torch.arange(received_PE.shape[1], dtype=torch.int16, device=rows_RD.device)
        of_expert_R = own_E.repeat(self.size)
        expert_R = of_expert_R.repeat_interleave(received_PE.flatten(), output_size=len(rows_RD))
        order_R = expert_R.argsort(stable=True)
        place_R = inverse(order_R)

        def results() -> Tensor:
            sorted_RD = sorted_rows(_arrived(rows_RD, rows), order_R, place_R, 1)
            sorted_R = sorted_rows(_arrived(weights_R, weights), order_R, place_R, 1)
            out_RD = compute(sorted_RD, sorted_R, received_PE.sum(0))
            transfer = _Transfer(*back, self.group)
            out_RD = sorted_rows(out_RD, place_R, order_R, 1)
            return _arrived(_sent(out_RD, transfer), transfer)

        return results


@dataclass
class _Transfer:
    """An all-to-all of rows, and in the backward pass that of their gradients the other way."""

    sent: Sequence[int]
    got: Sequence[int]
    group: ProcessGroup
    received: Tensor | None = None
    work: dist.Work | None = None

    def start(self, rows: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        self.received = rows.new_empty(sum(got), *rows.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, rows.contiguous(), list(got), list(sent), self.group, async_op=True
        )
        return self.received

    def wait(self) -> Tensor:
        """Let the device wait for the rows, and return them; on a CPU the host waits."""
        assert self.received is not None
        assert self.work is not None
        self.work.wait()
        received, self.received, self.work = self.received, None, None
        return received


# Two functions, so that autograd runs what is between them while gradients travel. That of torch
# (`_c10d_functional_autograd`) waits at once in the backward pass.
class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows, transfer.sent, transfer.got)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.wait(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.start(grads[0], ctx.transfer.got, ctx.transfer.sent)
        # Autograd wants a gradient of this shape. The one under way has that of what was sent.
        return grads[0], None


_sent: Callable[[Tensor, _Transfer], Tensor] = _Sent.apply
_arrived: Callable[[Tensor, _Transfer], Tensor] = _Arrived.apply
