"""Sums over complete matrices of which each rank holds a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtt.optim.muon.all_to_all import WaitTimer
from dtt.optim.muon.redistribution import Bucket


class MatrixSums(NamedTuple):
    """Sums over the matrices of a bucket, possibly in flight."""

    bucket: Bucket
    total: Tensor
    """[matrices, sums], at least fp32."""
    work: dist.Work | None = None

    @property
    def pending(self) -> bool:
        """True if there is a collective to wait for."""
        return self.work is not None

    def wait(self, timer: WaitTimer) -> list[Tensor]:
        """Return the sums [N, sums] for the matrices of each batch."""
        if self.work is not None:
            timer.wait(self.work, self.total.device)
        return [
            # Read per shard, in the order of this rank's batches: ranks hold different matrices.
            torch.stack([self.total[shard.matrix] for shard in batch.shards])
            for batch in self.bucket.batches
        ]


def start(bucket: Bucket, of_shards: Sequence[Tensor], count: int) -> MatrixSums:
    """Start adding up sums over the shards of this rank: [N, count] for each batch.

    A collective if matrices are sharded: one all-reduce, the same result on every rank. Each shard
    is counted on one of its replicas only.
    """
    device = of_shards[0].device if of_shards else bucket.device
    # Zeros for matrices of which this rank has no shard: every rank takes part in the all-reduce
    # with the same shape.
    total = torch.zeros(bucket.matrices, count, device=device, dtype=bucket.dtype)
    shards = [shard for batch in bucket.batches for shard in batch.shards]
    sums = [row for part in of_shards for row in part.unbind()]
    # Replicas hold equal shards. Counting each would multiply the sum by the number of replicas.
    counted = [pair for pair in zip(shards, sums, strict=True) if pair[0].counted]
    if counted:
        targets = [total[shard.matrix] for shard, _ in counted]
        # One fused copy: a loop would launch a kernel per matrix.
        torch._foreach_copy_(targets, [row for _, row in counted])
    # Each rank has complete matrices, so its sums are complete, too.
    if not bucket.sharded:
        return MatrixSums(bucket, total)
    return MatrixSums(bucket, total, dist.all_reduce(total, group=bucket.group, async_op=True))
