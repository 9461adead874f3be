"""What a process holds of the matrices that Muon updates at once, and what it sends whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtt.optim.exchange import ALONE, Exchange, Piece
from dtt.optim.owners import Matrix, Spread, buckets, matrices, share_out
from dtt.runtime.sharding import Box, boxes, copies, local

Index = tuple[slice, ...]
Shape = tuple[int, int]


class Place(NamedTuple):
    """Of a part of a matrix."""

    parameter: Tensor
    rows: Index
    """Which it is of those that this process holds of the parameter."""
    offset: tuple[int, ...]
    """Of its first number, in the whole parameter."""


class Batch(NamedTuple):
    """Parts of one shape that this process holds of matrices of one shape and group."""

    group: int
    """Its number in the optimizer."""
    shape: Shape
    """Rows and columns of the whole matrices."""
    places: list[Place]
    """Of each part."""

    def of(self, tensor: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Views [r, c] of the parts, in a tensor of each parameter: itself, its gradient, or a
        state with a number for each weight or row."""
        return [local(tensor(place.parameter))[place.rows].flatten(0, -2) for place in self.places]


class Routes(NamedTuple):
    """Parts of matrices to those who own these, and results to all who hold the parts."""

    to_owners: Exchange = ALONE
    """From [N, r, c] for each batch to [N, R, C] for each shape and group."""
    to_holders: Exchange = ALONE
    """And back."""


class Bucket(NamedTuple):
    """Matrices that are updated at once, as one process sees them."""

    batches: list[Batch]
    parts: Routes = Routes()
    rows: Routes = Routes()
    """For one number of each row to the owners, and two back."""


Group = tuple[Sequence[Tensor], Sequence[int] | None]
"""Parameters [R, C] or [E, R, C], and rows of the matrices in them; None: all R."""


def plan(groups: Iterable[Group], limit: int, dtype: torch.dtype, rows: bool) -> list[Bucket]:
    """Share the matrices out over all processes, of which each comes to its side of the same
    buckets; `limit` is that of `owners.buckets`.

    Parts travel as `dtype`, and with `rows` numbers that belong to rows as fp32.
    """
    joined = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    spreads: dict[Any, Spread] = {}
    found: list[Matrix] = []
    for number, (parameters, split) in enumerate(groups):
        for p in parameters:
            kind = p.shape, getattr(p, "placements", None), getattr(p, "device_mesh", None)
            if kind not in spreads:
                by_rank = boxes(p)
                assert len(by_rank) == ranks, "all processes are in a parameter's mesh"
                largest = max(prod(box.shape) for box in by_rank.values())
                spreads[kind] = Spread(by_rank, copies(p), largest / p.numel())
            found += matrices(p, number, split, spreads[kind])
    cut = buckets(share_out(found, ranks), ranks, limit)
    return [_bucket(bucket, rank, ranks, dtype, rows) for bucket in cut]


def _bucket(
    bucket: Sequence[Matrix], rank: int, ranks: int, dtype: torch.dtype, rows: bool
) -> Bucket:
    """The side of process `rank`."""
    held, owned = _Stacks(), _Stacks()
    batches: dict[int, Batch] = {}
    for i, matrix in enumerate(bucket):
        box = matrix.spread.boxes[rank]
        if index := _overlap(matrix.box, box):
            height, width = (cut.stop - cut.start for cut in index[-2:])
            number = held.add(i, matrix, (height, width))
            batch = batches.setdefault(number, Batch(matrix.group, matrix.shape, []))
            offset = tuple(o + cut.start for o, cut in zip(box.offset, index, strict=True))
            batch.places.append(Place(matrix.parameter, index[:-1], offset))
        if matrix.owner == rank:
            owned.add(i, matrix, matrix.shape)
    known = list(batches.values())
    if ranks == 1:
        return Bucket(known)
    sides = bucket, held, owned, rank, ranks
    parts = _routes(*sides, dtype, of_rows=False)
    return Bucket(known, parts, _routes(*sides, torch.float32, of_rows=True) if rows else Routes())


def _overlap(part: Box, whole: Box) -> Index:
    """Index in `whole` of what `part` has of it; () if that is not even a row."""
    index = []
    for begin, size, first, length in zip(
        part.offset, part.shape, whole.offset, whole.shape, strict=True
    ):
        start = max(begin, first)
        stop = max(start, min(begin + size, first + length))
        index.append(slice(start - first, stop - first))
    return tuple(index) if all(cut.start < cut.stop for cut in index[:-1]) else ()


class _Stacks:
    """The stacks into which a process puts matrices, or what it has of them."""

    def __init__(self) -> None:
        self.places: dict[int, Piece] = {}
        """By number in the bucket."""
        self._sizes: dict[tuple[int, Shape, Shape], int] = {}

    def add(self, i: int, matrix: Matrix, extent: Shape) -> int:
        """Put [r, c] of matrix `i` on others of its kind; returns the number of that stack."""
        kind = matrix.group, matrix.shape, extent
        size = self._sizes.setdefault(kind, 0)
        self._sizes[kind] += 1
        number = list(self._sizes).index(kind)
        self.places[i] = Piece(number, (size,))
        return number

    def shapes(self, columns: int | None) -> list[tuple[int, int, int]]:
        """[N, r, c] of each, with another c if it is given."""
        return [(n, r, columns or c) for (_, _, (r, c)), n in self._sizes.items()]


def _routes(
    bucket: Sequence[Matrix],
    held: _Stacks,
    owned: _Stacks,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    *,
    of_rows: bool,
) -> Routes:
    """What `rank` sends and receives of parts; or, `of_rows`, of numbers that belong to whole rows.

    An owner gets the parts of one copy of the parameter: its own. Rows come from who has their
    first column.
    """
    part_to, part_of, result_to, result_of = (
        [list[Piece]() for _ in range(ranks)] for _ in range(4)
    )
    at_home = True
    for i, matrix in enumerate(bucket):
        spread, owner = matrix.spread, matrix.owner
        at_home &= prod(spread.boxes[owner].shape) == matrix.parameter.numel()
        for other in spread.boxes if owner == rank else [rank]:
            index = _overlap(spread.boxes[other], matrix.box)[-2:]
            if not index:
                continue
            sends = spread.copies[other] == spread.copies[owner]
            if of_rows:
                sends, index = sends and index[1].start == 0, index[:1]
            if owner == rank:
                whole = owned.places[i]
                piece = Piece(whole.stack, (*whole.place, *index))
                result_to[other].append(piece)
                if sends:
                    part_of[other].append(piece)
            if other == rank:
                result_of[owner].append(held.places[i])
                if sends:
                    part_to[owner].append(held.places[i])
    there, back = (1, 2) if of_rows else (None, None)
    how = dtype, bucket[0].parameter.device
    return Routes(
        Exchange(part_to, part_of, owned.shapes(there), *how, at_home),
        Exchange(result_to, result_of, held.shapes(back), *how),
    )
