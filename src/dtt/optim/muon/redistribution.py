"""Redistribution plan of Muon: the shards of matrices that each rank holds, sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtt.mesh.dtypes import wide_dtype
from dtt.mesh.sharding import TensorLayout, TensorSlice, local, this_rank
from dtt.optim.muon.all_to_all import NO_COMMUNICATION, AllToAll, StackSlice
from dtt.optim.muon.shard_assignment import Matrix, assign, buckets, holders, matrices

Index = tuple[slice, ...]
Shape = tuple[int, int]


class MatrixShard(NamedTuple):
    """Location of a shard of a matrix that this rank holds."""

    parameter: Tensor
    rows: Index
    """Index of its rows in this rank's local part of the parameter."""
    offset: tuple[int, ...]
    """Offset of its first element in the full parameter."""
    matrix: int = 0
    """Index of the matrix in the bucket."""
    counted: bool = True
    """True if sums over the matrix include this shard; other replicas hold it too."""


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
    matrices: int = 0
    """Number of matrices in the bucket, on all ranks."""
    sharded: bool = False
    """True if a rank may hold only a part of a matrix, so that sums need an all-reduce."""
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    """Data type of sums over matrices, the same on a rank without a shard."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the matrices; None: all."""


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
    `limit` is that of `shard_assignment.buckets`. Shards are sent in `dtype`; with `rows`, per-row
    values are sent in fp32.
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
    sharded = any(layout.replica_count < len(layout.ranks) for layout in layouts)
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
            # The replica of the first rank counts. Without sharding, each rank's own sums are
            # complete.
            counted = layout.replicas[rank] == layout.replicas[layout.ranks[0]] or not sharded
            batch.shards.append(MatrixShard(matrix.parameter, index[:-1], offset, i, counted))
        if matrix.assigned_rank == rank:
            assigned.add(i, matrix, matrix.shape)
    group = layouts[0].group if len(ranks) > 1 else None
    alone = Bucket(
        list(batches.values()),
        matrices=len(bucket),
        sharded=sharded,
        device=bucket[0].parameter.device,
        dtype=wide_dtype(bucket[0].parameter),
        group=group,
    )
    if len(ranks) == 1:
        return alone
    sides = bucket, layouts, held, assigned, ranks
    gather, scatter = _redistribution(*sides, dtype, of_rows=False)
    both = alone._replace(gather=gather, scatter=scatter)
    if not rows:
        return both
    gather, scatter = _redistribution(*sides, alone.dtype, of_rows=True)
    return both._replace(gather_rows=gather, scatter_rows=scatter)


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
