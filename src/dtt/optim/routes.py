"""Redistribution plan of Muon: which parts of matrices each rank holds, and what it sends where."""

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
    """Location of a part of a matrix that this rank holds."""

    parameter: Tensor
    rows: Index
    """Index of its rows in this rank's local part of the parameter."""
    offset: tuple[int, ...]
    """Offset of its first element in the full parameter."""


class Batch(NamedTuple):
    """Parts of one shape that this rank holds, of matrices of one shape and group."""

    group: int
    """Index of the group in the optimizer."""
    shape: Shape
    """Rows and columns of the full matrices."""
    places: list[Place]
    """Location of each part."""

    def of(self, tensor: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return views [r, c] of the parts in `tensor(parameter)`.

        That tensor is the parameter itself, its gradient, or a state with one number per weight or
        per row.
        """
        return [local(tensor(place.parameter))[place.rows].flatten(0, -2) for place in self.places]


class Routes(NamedTuple):
    """The two all-to-alls of an update: parts to the owners of matrices, and results back."""

    to_owners: Exchange = ALONE
    """Gathers parts [N, r, c] of each batch into matrices [N, R, C] of each shape and group."""
    to_holders: Exchange = ALONE
    """Scatters results [N, R, C] to the ranks that hold the parts [N, r, c]."""


class Bucket(NamedTuple):
    """One rank's side of a set of matrices that are updated at once."""

    batches: list[Batch]
    parts: Routes = Routes()
    """Routes of the parts."""
    rows: Routes = Routes()
    """Routes of per-row values (NorMuon): one number per row to the owners, two back."""


Group = tuple[Sequence[Tensor], Sequence[int] | None]
"""Parameters [R, C] or [E, R, C], and the numbers of rows of the matrices in each; None: all R."""


def plan(groups: Iterable[Group], limit: int, dtype: torch.dtype, rows: bool) -> list[Bucket]:
    """Assign the matrices to ranks and return this rank's side of each bucket.

    Every rank computes the same buckets, without communication. `limit` is that of
    `owners.buckets`. Parts are sent in `dtype`; with `rows`, per-row values are sent in fp32.
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
    """Return the side of `rank`."""
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
    """Return the index, relative to `whole`, of its overlap with `part`; () if they share no row.

    The range of columns may be empty.
    """
    index = []
    for begin, size, first, length in zip(
        part.offset, part.shape, whole.offset, whole.shape, strict=True
    ):
        start = max(begin, first)
        stop = max(start, min(begin + size, first + length))
        index.append(slice(start - first, stop - first))
    return tuple(index) if all(cut.start < cut.stop for cut in index[:-1]) else ()


class _Stacks:
    """Layout of the stacks in which a rank collects matrices, or its parts of them."""

    def __init__(self) -> None:
        self.places: dict[int, Piece] = {}
        """Position of each matrix in the stacks, by its index in the bucket."""
        self._sizes: dict[tuple[int, Shape, Shape], int] = {}

    def add(self, i: int, matrix: Matrix, extent: Shape) -> int:
        """Add the part [r, c] of matrix `i` to the stack of its kind; return that stack's index."""
        kind = matrix.group, matrix.shape, extent
        size = self._sizes.setdefault(kind, 0)
        self._sizes[kind] += 1
        number = list(self._sizes).index(kind)
        self.places[i] = Piece(number, (size,))
        return number

    def shapes(self, columns: int | None) -> list[tuple[int, int, int]]:
        """Return the shape [N, r, c] of each stack, with `columns` for c if given."""
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
    """Return the messages that `rank` sends and receives: parts or, with `of_rows`, row values.

    An owner receives the parts of its own replica of the parameter only. The values of a row are
    sent by the rank that holds the row's first column.
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
