"""Which process orthogonalises which matrix, so that all have about as much to do."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from dtt.runtime.sharding import Box

BUCKETS = 4
"""At least so many where processes exchange matrices: there is to be work while messages are on
their way."""


class Spread(NamedTuple):
    """Which process holds what of a parameter, by rank."""

    boxes: Mapping[int, Box]
    copies: Mapping[int, Any]
    """Which copy of the parameter that is a part of."""
    share: float
    """What is held by the process that holds most, where all is 1."""


class Matrix(NamedTuple):
    """One matrix [R, C] of a parameter."""

    parameter: Tensor
    group: int
    """Number of the parameter's group in the optimizer."""
    box: Box
    """Where it is in the parameter."""
    spread: Spread
    owner: int = 0
    """Rank that orthogonalises it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box.shape[-2], self.box.shape[-1]

    @property
    def flops(self) -> int:
        """Of an iteration of Newton-Schulz: X X^T, its square, and the product of these with X."""
        short, long = sorted(self.shape)
        return 2 * short * short * (2 * long + short)

    @property
    def held(self) -> float:
        """Numbers of it that a process holds, at most; of a stack on average."""
        return prod(self.shape) * self.spread.share


def matrices(
    parameter: Tensor, group: int, split: Sequence[int] | None, spread: Spread
) -> Iterator[Matrix]:
    """Those of a parameter [R, C] or [E, R, C], with R cut into parts as `split` says."""
    *stack, rows, columns = parameter.shape
    for i in range(prod(stack)):
        row = 0
        for part in split or (rows,):
            offset, shape = (i, row, 0), (1, part, columns)
            box = Box(offset, shape) if stack else Box(offset[1:], shape[1:])
            yield Matrix(parameter, group, box, spread)
            row += part


def share_out(matrices: Iterable[Matrix], ranks: int) -> list[Matrix]:
    """Give each an owner, the costliest first: always the rank with the least to do, or the lowest
    of these.

    So all ranks come to the same, and none does more than 4/3 of what is the least possible for the
    busiest (longest processing time first, Graham 1969). In the order in which they were given out;
    those of one shape and group come together.
    """
    owned = []
    loads = [(0, rank) for rank in range(ranks)]
    for matrix in sorted(matrices, key=lambda m: (-m.flops, m.shape, m.group)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + matrix.flops, rank))
        owned.append(matrix._replace(owner=rank))
    return owned


def buckets(owned: Sequence[Matrix], ranks: int, limit: int) -> Iterator[list[Matrix]]:
    """Cut what `share_out` gives into those that are updated at once.

    No rank holds or owns more than `limit` numbers of a bucket, unless they are of one matrix.
    Where there are several ranks, a bucket has about a quarter of the work, and a matrix for each.
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
