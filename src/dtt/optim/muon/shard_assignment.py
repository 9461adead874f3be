"""Assignment of matrices to ranks for orthogonalisation, balanced by FLOPs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from dtt.mesh.sharding import TensorLayout, TensorSlice

BUCKETS = 4
"""Target number of buckets where ranks exchange matrices: with several, one computes while the
messages of another are in flight. The size limit may require more."""


class Matrix(NamedTuple):
    """One matrix [R, C] of a parameter."""

    parameter: Tensor
    group: int
    """Index of the parameter's group in the optimizer."""
    box: TensorSlice
    """Position of the matrix in the parameter."""
    local_fraction: float
    """Fraction of the parameter held by the rank that holds most, 0 to 1."""
    holders: tuple[int, ...] = ()
    """Ranks that hold all of it, if others hold nothing of it: those of an expert; else empty."""
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
    parameter: Tensor,
    group: int,
    split: Sequence[int] | None,
    local_fraction: float,
    holders: Sequence[tuple[int, ...]] = (),
) -> Iterator[Matrix]:
    """Yield the matrices of a parameter [R, C] or [E, R, C].

    `split` cuts R into matrices with these numbers of rows; None makes one matrix of all R.
    `holders` are those of each expert of a stack, if whole ones are held.
    """
    *stack, rows, columns = parameter.shape
    for i in range(prod(stack)):
        row = 0
        for height in split or (rows,):
            offset, shape = (i, row, 0), (1, height, columns)
            box = TensorSlice(offset, shape) if stack else TensorSlice(offset[1:], shape[1:])
            yield Matrix(parameter, group, box, local_fraction, holders[i] if holders else ())
            row += height


def holders(layout: TensorLayout) -> list[tuple[int, ...]]:
    """Return the ranks that hold each matrix of a stack; empty if one is held in parts, or by all.

    No rank has to send an expert that it holds alone.
    """
    experts, *matrix = layout.shape
    of_expert: list[list[int]] = [[] for _ in range(experts)]
    for rank, box in layout.boxes.items():
        if list(box.shape[1:]) != matrix and 0 not in box.shape:
            return []
        for e in range(box.offset[0], box.offset[0] + box.shape[0]):
            of_expert[e].append(rank)
    everyone = len(layout.ranks)
    return [] if len(of_expert[0]) == everyone else [tuple(ranks) for ranks in of_expert]


def assign(matrices: Iterable[Matrix], ranks: Iterable[int]) -> list[Matrix]:
    """Assign a rank to each matrix: greedily, the most expensive matrix first.

    Each is assigned to the rank with the least work so far, or the lowest such rank; before them,
    those with `holders` to one of these. The result is deterministic, so every rank computes the
    same one, and without holders the busiest rank has at most 4/3 of the optimum (longest
    processing time first, Graham 1969). Matrices of one shape and group are adjacent.
    """
    # Sorting by group last keeps matrices of one batch adjacent. `sorted` is stable, so ties stay
    # in the order of the parameters, which is equal on all ranks.
    ordered = sorted(matrices, key=lambda m: (-m.flops, m.shape, m.group))
    work = dict.fromkeys(sorted(ranks), 0)
    of_index: dict[int, int] = {}
    for i, matrix in enumerate(ordered):
        if matrix.holders:
            of_index[i] = min(matrix.holders, key=lambda rank: (work[rank], rank))
            work[of_index[i]] += matrix.flops
    loads = [(load, rank) for rank, load in work.items()]
    heapq.heapify(loads)
    for i, matrix in enumerate(ordered):
        if not matrix.holders:
            load, of_index[i] = loads[0]
            heapq.heapreplace(loads, (load + matrix.flops, of_index[i]))
    return [matrix._replace(assigned_rank=of_index[i]) for i, matrix in enumerate(ordered)]


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
