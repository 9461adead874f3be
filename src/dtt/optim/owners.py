"""Assignment of matrices to ranks for orthogonalisation, balanced by FLOPs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from dtt.runtime.sharding import Box

BUCKETS = 4
"""Target number of buckets where ranks exchange matrices: with several, one computes while the
messages of another are in flight. The size limit may make more."""


class Spread(NamedTuple):
    """Distribution of a parameter over the ranks."""

    boxes: Mapping[int, Box]
    """The part that each rank holds, by rank."""
    copies: Mapping[int, Any]
    """Replica to which each rank's part belongs, by rank: ranks with equal values hold one complete
    parameter together."""
    share: float
    """Fraction of the parameter held by the rank that holds most, 0 to 1."""


class Matrix(NamedTuple):
    """One matrix [R, C] of a parameter."""

    parameter: Tensor
    group: int
    """Index of the parameter's group in the optimizer."""
    box: Box
    """Position of the matrix in the parameter."""
    spread: Spread
    owner: int = 0
    """Rank that orthogonalises it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box.shape[-2], self.box.shape[-1]

    @property
    def flops(self) -> int:
        """FLOPs of a Newton-Schulz iteration: X X^T, its square, and their product with X."""
        short, long = sorted(self.shape)
        return 2 * short * short * (2 * long + short)

    @property
    def held(self) -> float:
        """Maximum number of elements that one rank holds; for a stack, the average over it."""
        return prod(self.shape) * self.spread.share


def matrices(
    parameter: Tensor, group: int, split: Sequence[int] | None, spread: Spread
) -> Iterator[Matrix]:
    """Yield the matrices of a parameter [R, C] or [E, R, C].

    `split` cuts R into matrices with these numbers of rows; None makes one matrix of all R.
    """
    *stack, rows, columns = parameter.shape
    for i in range(prod(stack)):
        row = 0
        for part in split or (rows,):
            offset, shape = (i, row, 0), (1, part, columns)
            box = Box(offset, shape) if stack else Box(offset[1:], shape[1:])
            yield Matrix(parameter, group, box, spread)
            row += part


def share_out(matrices: Iterable[Matrix], ranks: int) -> list[Matrix]:
    """Assign an owner to each matrix: greedily, the most expensive matrix first.

    Each goes to the rank with the least work so far, on a tie to the lowest rank. The result is
    deterministic, so every rank computes the same one, and the busiest rank has at most 4/3 of the
    optimum (longest processing time first, Graham 1969). Matrices are returned in the order of
    assignment, in which those of one shape and group are adjacent.
    """
    owned = []
    loads = [(0, rank) for rank in range(ranks)]
    for matrix in sorted(matrices, key=lambda m: (-m.flops, m.shape, m.group)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + matrix.flops, rank))
        owned.append(matrix._replace(owner=rank))
    return owned


def buckets(owned: Sequence[Matrix], ranks: int, limit: int) -> Iterator[list[Matrix]]:
    """Cut the output of `share_out` into buckets, each of which is updated at once.

    No rank holds or owns more than `limit` elements of a bucket, unless a single matrix has more.
    With several ranks, a bucket has about a quarter of the work, and at least a matrix per rank.
    """
    enough = sum(matrix.flops for matrix in owned) / BUCKETS
    bucket: list[Matrix] = []
    held, flops = 0.0, 0
    owns: Counter[int] = Counter()
    for matrix in owned:
        size, own = prod(matrix.shape), owns[matrix.owner]
        full = held + matrix.held > limit or (own > 0 and own + size > limit)
        if bucket and (full or (flops >= enough and len(bucket) >= ranks > 1)):
            yield bucket
            bucket, held, flops = [], 0.0, 0
            owns.clear()
        bucket.append(matrix)
        held, flops = held + matrix.held, flops + matrix.flops
        owns[matrix.owner] += size
    if bucket:
        yield bucket
