"""Assignment of matrices to ranks for orthogonalisation, balanced by FLOPs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from dtt.mesh.sharding import Box

BUCKETS = 4
"""Target number of buckets where ranks exchange matrices: with several, one computes while the
messages of another are in flight. The size limit may require more."""


class Matrix(NamedTuple):
    """One matrix [R, C] of a parameter."""

    parameter: Tensor
    group: int
    """Index of the parameter's group in the optimizer."""
    box: Box
    """Position of the matrix in the parameter."""
    local_fraction: float
    """Fraction of the parameter held by the rank that holds most, 0 to 1."""
    assigned_rank: int = 0
    """Rank that orthogonalises it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box.shape[-2], self.box.shape[-1]

    @property
    def flops(self) -> int:
        """FLOPs of a Newton-Schulz iteration: X X^T, its square, and their product with X."""
        # X is [short, long]: 2 short² long for X Xᵀ and for the product with X, and 2 short³ for
        # the square.
        short, long = sorted(self.shape)
        return 2 * short * short * (2 * long + short)

    @property
    def local_elements(self) -> float:
        """Maximum number of elements that one rank holds; for a stack, the average over it."""
        return prod(self.shape) * self.local_fraction


def matrices(
    parameter: Tensor, group: int, split: Sequence[int] | None, local_fraction: float
) -> Iterator[Matrix]:
    """Yield the matrices of a parameter [R, C] or [E, R, C].

    `split` cuts R into matrices with these numbers of rows; None makes one matrix of all R.
    """
    *stack, rows, columns = parameter.shape
    for i in range(prod(stack)):
        row = 0
        for height in split or (rows,):
            offset, shape = (i, row, 0), (1, height, columns)
            box = Box(offset, shape) if stack else Box(offset[1:], shape[1:])
            yield Matrix(parameter, group, box, local_fraction)
            row += height


def assign(matrices: Iterable[Matrix], ranks: Iterable[int]) -> list[Matrix]:
    """Assign a rank to each matrix: greedily, the most expensive matrix first.

    Each is assigned to the rank with the least work so far, or the lowest such rank. The result is
    deterministic, so every rank computes the same one, and the busiest rank has at most 4/3 of the
    optimum (longest processing time first, Graham 1969). Matrices are returned in the order of
    assignment, in which those of one shape and group are adjacent.
    """
    assigned = []
    loads = [(0, rank) for rank in sorted(ranks)]
    # Sorting by group last keeps matrices of one batch adjacent. `sorted` is stable, so ties stay
    # in the order of the parameters, which is equal on all ranks.
    for matrix in sorted(matrices, key=lambda m: (-m.flops, m.shape, m.group)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + matrix.flops, rank))
        assigned.append(matrix._replace(assigned_rank=rank))
    return assigned


def buckets(assigned: Sequence[Matrix], ranks: int, limit: int) -> Iterator[list[Matrix]]:
    """Cut the output of `assign` into buckets, each of which is updated at once.

    No rank holds or orthogonalises more than `limit` elements of a bucket, unless a single matrix
    has more. With several ranks, a bucket has about a quarter of the work, and at least a matrix
    per rank.
    """
    enough = sum(matrix.flops for matrix in assigned) / BUCKETS
    bucket: list[Matrix] = []
    local, flops = 0.0, 0
    elements: Counter[int] = Counter()  # that each rank orthogonalises
    for matrix in assigned:
        size, before = prod(matrix.shape), elements[matrix.assigned_rank]
        # Memory on the holder (its shards) and on the assignee (complete matrices) are limited
        # separately.
        full = local + matrix.local_elements > limit or (before > 0 and before + size > limit)
        # At least one matrix per rank, or some ranks would idle in this bucket.
        if bucket and (full or (flops >= enough and len(bucket) >= ranks > 1)):
            yield bucket
            bucket, local, flops = [], 0.0, 0
            elements.clear()
        bucket.append(matrix)
        local, flops = local + matrix.local_elements, flops + matrix.flops
        elements[matrix.assigned_rank] += size
    if bucket:
        yield bucket
