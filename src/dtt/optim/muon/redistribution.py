"""The plan of Muon: the rank that orthogonalises each matrix, and what ranks send and receive.

Matrices are assigned to ranks so that all have about the same FLOPs.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtt.mesh.dtypes import wide_dtype
from dtt.mesh.sharding import TensorLayout, TensorSlice, local, this_rank
from dtt.optim.muon.all_to_all import NO_COMMUNICATION, AllToAll, StackSlice

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


# ---- what each rank holds, sends and receives ----------------------------------------------------

Index = tuple[slice, ...]
Shape = tuple[int, int]


class MatrixShard(NamedTuple):
    """Location of a shard of a matrix that this rank holds."""

    parameter: Tensor
    rows: Index
    """Index of its rows in this rank's local part of the parameter."""
    offset: tuple[int, ...]
    """Offset of its first element in the full parameter."""


class ShardBatch(NamedTuple):
    """Shards of one shape that this rank holds, of matrices of one shape and group."""

    group: int
    """Index of the group in the optimizer."""
    shape: Shape
    """Rows and columns of the full matrices."""
    shards: list[MatrixShard]
    """Location of each shard."""

    def of(self, tensor: Callable[[Tensor], Any]) -> list[Tensor]:
        """Return views [r, c] of the shards in `tensor(parameter)`.

        That tensor is the parameter itself, its gradient, or a state with one number per weight or
        per row.
        """
        return [local(tensor(shard.parameter))[shard.rows].flatten(0, -2) for shard in self.shards]


class Bucket(NamedTuple):
    """One rank's side of a set of matrices that are updated at once."""

    batches: list[ShardBatch]
    gather: AllToAll = NO_COMMUNICATION
    """Gathers shards [N, r, c] of each batch into matrices [N, R, C] of each shape and group."""
    scatter: AllToAll = NO_COMMUNICATION
    """Scatters results [N, R, C] to the ranks that hold the shards [N, r, c]."""
    gather_rows: AllToAll = NO_COMMUNICATION
    """Gathers one number per row (NorMuon)."""
    scatter_rows: AllToAll = NO_COMMUNICATION
    """Scatters two numbers per row."""


Group = tuple[Sequence[Tensor], Sequence[int] | None]
"""Parameters [R, C] or [E, R, C], and the numbers of rows of the matrices in each; None: all R."""


Layouts = Mapping[Tensor, TensorLayout]
"""Layout of each parameter."""


def plan(
    groups: Iterable[Group], layouts: Layouts, limit: int, dtype: torch.dtype, rows: bool
) -> list[Bucket]:
    """Assign the matrices to ranks and return this rank's side of each bucket.

    The matrices of a parameter are assigned among the ranks that hold it, which compute the same
    buckets without communication: parameters that they share must be in the same order on each.
    `limit` is that of `buckets`. Shards are sent in `dtype`; with `rows`, per-row values are sent
    in fp32.
    """
    by_ranks: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
    for number, (parameters, split) in enumerate(groups):
        for p in parameters:
            layout = layouts[p]
            whole = holders(layout) if p.ndim > 2 else []
            found = matrices(p, number, split, layout.largest_fraction, whole)
            # Only ranks that hold a parameter can exchange it, so matrices are planned per set of
            # ranks.
            by_ranks[tuple(sorted(layout.ranks))] += found
    return [
        _bucket(bucket, layouts, ranks, dtype, rows)
        # Sorted, so that ranks in several sets start their collectives in the same order; another
        # order would deadlock.
        for ranks, found in sorted(by_ranks.items(), key=lambda item: item[0])
        for bucket in buckets(assign(found, ranks), len(ranks), limit)
    ]


def _bucket(
    bucket: Sequence[Matrix],
    of_parameters: Layouts,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    rows: bool,
) -> Bucket:
    """Return this rank's side."""
    rank = this_rank()
    layouts = [of_parameters[matrix.parameter] for matrix in bucket]
    held, assigned = _StackLayout(), _StackLayout()
    batches: dict[int, ShardBatch] = {}
    # In the order of the bucket on every rank: sender and receiver agree on the positions without a
    # message.
    for i, (matrix, layout) in enumerate(zip(bucket, layouts, strict=True)):
        box = layout.box(rank)
        if index := _overlap(matrix.box, box):
            height, width = (side.stop - side.start for side in index[-2:])
            number = held.add(i, matrix, (height, width))
            batch = batches.setdefault(number, ShardBatch(matrix.group, matrix.shape, []))
            offset = tuple(o + side.start for o, side in zip(box.offset, index, strict=True))
            batch.shards.append(MatrixShard(matrix.parameter, index[:-1], offset))
        if matrix.assigned_rank == rank:
            assigned.add(i, matrix, matrix.shape)
    found = list(batches.values())
    if len(ranks) == 1:
        return Bucket(found)
    sides = bucket, layouts, held, assigned, ranks
    gather, scatter = _redistribution(*sides, dtype, of_rows=False)
    if not rows:
        return Bucket(found, gather=gather, scatter=scatter)
    wide = wide_dtype(bucket[0].parameter)
    gather_rows, scatter_rows = _redistribution(*sides, wide, of_rows=True)
    return Bucket(
        found, gather=gather, scatter=scatter, gather_rows=gather_rows, scatter_rows=scatter_rows
    )


def _overlap(part: TensorSlice, container: TensorSlice) -> Index:
    """Return the index, relative to `container`, of its overlap with `part`; () without a row.

    The range of columns may be empty.
    """
    index = []
    for begin, size, first, length in zip(
        part.offset, part.shape, container.offset, container.shape, strict=True
    ):
        start = max(begin, first)
        stop = max(start, min(begin + size, first + length))
        index.append(slice(start - first, stop - first))
    # Empty columns remain: a rank may hold no column of a row, but row values still need its place.
    return tuple(index) if all(side.start < side.stop for side in index[:-1]) else ()


class _StackLayout:
    """Layout of the stacks in which a rank collects matrices, or its shards of them."""

    def __init__(self) -> None:
        self.slices: dict[int, StackSlice] = {}
        """Position of each matrix in the stacks, by its index in the bucket."""
        self._sizes: dict[tuple[int, Shape, Shape], int] = {}

    def add(self, i: int, matrix: Matrix, extent: Shape) -> int:
        """Add the shard [r, c] of matrix `i` to the stack of its kind; return its stack's index."""
        kind = matrix.group, matrix.shape, extent
        size = self._sizes.setdefault(kind, 0)
        self._sizes[kind] += 1
        number = list(self._sizes).index(kind)
        # Stacks, because matrices of one kind are orthogonalised in one batched product.
        self.slices[i] = number, (size,)
        return number

    def shapes(self, columns: int | None) -> list[tuple[int, int, int]]:
        """Return the shape [N, r, c] of each stack, with `columns` for c if given."""
        return [(n, r, columns or c) for (_, _, (r, c)), n in self._sizes.items()]


def _redistribution(
    bucket: Sequence[Matrix],
    layouts: Sequence[TensorLayout],
    held: _StackLayout,
    assigned: _StackLayout,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    *,
    of_rows: bool,
) -> tuple[AllToAll, AllToAll]:
    """Return the messages that this rank sends and receives: shards or, with `of_rows`, row values.

    The first gathers them on the assigned ranks, the second scatters the results.

    A rank receives the shards of its matrices from its own replica of the parameter only. The
    values of a row are sent by the rank that holds the row's first column.
    """
    rank, position = this_rank(), {rank: i for i, rank in enumerate(ranks)}
    shards_to, shards_from, results_to, results_from = (
        [list[StackSlice]() for _ in ranks] for _ in range(4)
    )
    all_local = True
    for i, (matrix, layout) in enumerate(zip(bucket, layouts, strict=True)):
        assignee = matrix.assigned_rank
        # False if any assignee lacks a part. Every rank computes the same value, so all or none
        # skip the collective.
        all_local &= prod(layout.boxes[assignee].shape) == matrix.parameter.numel()
        for other in layout.ranks if assignee == rank else [rank]:
            # Relative to the matrix, so that both sides index the same elements.
            index = _overlap(layout.boxes[other], matrix.box)[-2:]
            if not index:
                continue
            # Other replicas hold the same numbers; sending them would multiply the traffic.
            sends = layout.replicas[other] == layout.replicas[assignee]
            if of_rows:
                sends, index = sends and index[1].start == 0, index[:1]
            if assignee == rank:
                stack, place = assigned.slices[i]
                part = stack, (*place, *index)
                results_to[position[other]].append(part)
                if sends:
                    shards_from[position[other]].append(part)
            if other == rank:
                # Results go to every replica: each updates its own weights.
                results_from[position[assignee]].append(held.slices[i])
                if sends:
                    shards_to[position[assignee]].append(held.slices[i])
    gathered, scattered = (1, 2) if of_rows else (None, None)
    how = dtype, bucket[0].parameter.device, layouts[0].group
    return (
        AllToAll(shards_to, shards_from, assigned.shapes(gathered), *how, all_local),
        # The way back is never local: the other ranks need the results.
        AllToAll(results_to, results_from, held.shapes(scattered), *how),
    )
