"""Shards of a tensor: the part that each rank holds, as offsets and shapes.

torch's DTensor describes a tensor by its placements on the dimensions of a mesh: sharded (`Shard`)
or replicated (`Replicate`). This module converts placements to boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import compress, product
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dtt.errors import DamagedError


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


class Held(NamedTuple):
    """The part of a tensor that this rank holds."""

    local: Tensor
    box: Box
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    peers: tuple[int, ...]
    """Ranks that hold the same part, including this one."""
    copy: int
    """Index of this replica among them."""

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part."""
        return len(self.peers)


class Whole(Protocol):
    """A complete tensor, in memory or in files, that can be read by index."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Return a part of the tensor; with (), all of it."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory; a plain tensor is returned as is."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def held(tensor: Tensor) -> Held:
    """Return the part of `tensor` that this rank holds; every rank holds all of a plain tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return Held(tensor, Box((0,) * len(shape), shape), shape, tuple(range(size)), rank)
    mesh, placements = tensor.device_mesh, tensor.placements
    place = mesh.get_coordinate()
    assert place is not None, "every process is in the mesh"
    copy, fixed = 0, list[int | None](place)
    for i, placement in enumerate(placements):
        if placement.is_replicate():
            copy, fixed[i] = copy * mesh.size(i) + place[i], None
    box = _box(shape, placements, mesh.shape, place)
    return Held(local(tensor), box, shape, _peers(mesh, tuple(fixed)), copy)


@cache
def _peers(mesh: DeviceMesh, place: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the ranks at coordinates `place` of the mesh; None selects the whole dimension."""
    index = tuple(slice(None) if n is None else n for n in place)
    return tuple(mesh.mesh[index].flatten().tolist())


@torch.no_grad()
def fill(tensor: Tensor, whole: Whole) -> None:
    """Copy this rank's part of `whole` into `tensor`.

    Raises DamagedError if their shapes differ, or if only one of them is floating-point.
    """
    part = held(tensor)
    alike = whole.dtype.is_floating_point == tensor.dtype.is_floating_point
    if tuple(whole.shape) != part.shape or not alike:
        raise DamagedError(
            "a tensor of the checkpoint cannot be used here",
            why=f"it is {list(whole.shape)} of {whole.dtype}, not {list(part.shape)} of "
            f"{tensor.dtype}",
        )
    part.local.copy_(whole[part.box.slices])


def boxes(tensor: Tensor) -> dict[int, Box]:
    """Return the part of `tensor` that each rank holds, by rank."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return dict.fromkeys(range(ranks), Box((0,) * len(shape), shape))
    mesh = tensor.device_mesh
    places = product(*(range(size) for size in mesh.shape))
    return {
        int(mesh.mesh[place]): _box(shape, tensor.placements, mesh.shape, place) for place in places
    }


def copies(tensor: Tensor) -> dict[int, tuple[int, ...]]:
    """Return the replica of `tensor` to which each rank's part belongs, by rank.

    Ranks with the same value together hold one full tensor.
    """
    if not isinstance(tensor, DTensor):
        return {rank: (rank,) for rank in boxes(tensor)}
    mesh = tensor.device_mesh
    repeated = [placement.is_replicate() for placement in tensor.placements]
    places = product(*(range(size) for size in mesh.shape))
    return {int(mesh.mesh[place]): tuple(compress(place, repeated)) for place in places}


def _box(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], place: Sequence[int]
) -> Box:
    """Return the part at coordinates `place` of a mesh of shape `sizes`.

    Each dimension is split as `torch.chunk` does. FSDP2 splits what tensor parallelism has already
    split, although its mesh dimension comes first: torch marks such placements as strided.
    """
    offset, extent = [0] * len(shape), list(shape)
    cuts = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    for i in sorted(cuts, key=lambda i: hasattr(placements[i], "split_factor")):
        dim = placements[i].dim
        rows = -(-extent[dim] // sizes[i])
        first = min(rows * place[i], extent[dim])
        offset[dim] += first
        extent[dim] = min(rows, extent[dim] - first)
    return Box(tuple(offset), tuple(extent))


def zeros_beside(parameter: Tensor, shape: Sequence[int], **how: Any) -> Tensor:
    """Return zeros of `shape`, sharded as `parameter` is in all dimensions that are not 1.

    `shape` has the parameter's size or 1 in each dimension: optimizer states have one number per
    weight, or one per row.
    """
    assert len(shape) == parameter.ndim
    assert all(n in (1, whole) for n, whole in zip(shape, parameter.shape, strict=True))
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(tuple(shape), **how)
    mesh = parameter.device_mesh
    placements = [p if keeps(p, shape) else Replicate() for p in parameter.placements]
    box = _box(shape, placements, mesh.shape, mesh.get_coordinate() or ())
    return as_cut(local(parameter).new_zeros(box.shape, **how), mesh, placements, shape)


def keeps(placement: Any, shape: Sequence[int]) -> bool:
    """Return True if `placement` shards a tensor of `shape`: a dimension of 1 is not split."""
    return not placement.is_replicate() and shape[placement.dim] > 1


def as_cut(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of `shape` from each rank's local part."""
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    cut: DTensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return cut
