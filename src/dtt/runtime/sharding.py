"""Which part of a tensor this process holds, and which the others do.

torch's DTensor says over which dimensions of a mesh of processes a tensor is cut (`Shard`), and
over which it is repeated (`Replicate`). Here that becomes boxes: where a part begins, how large.
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
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


class Held(NamedTuple):
    """What this process holds of a tensor."""

    local: Tensor
    box: Box
    shape: tuple[int, ...]
    """Of the whole."""
    peers: tuple[int, ...]
    """Ranks of the processes that hold the same, this one among them."""
    copy: int
    """Which of these it is."""

    @property
    def copies(self) -> int:
        """How many these are."""
        return len(self.peers)


class Whole(Protocol):
    """A tensor that is all there, in memory or in files: an index is read from it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A part of it; with () all."""


def local(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`, in the same memory; a tensor that is not cut is its own."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def held(tensor: Tensor) -> Held:
    """What this process holds of `tensor`; of a plain one that is all, as all processes do."""
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
    """The ranks at a place of the mesh; None: anywhere in that dimension."""
    index = tuple(slice(None) if n is None else n for n in place)
    return tuple(mesh.mesh[index].flatten().tolist())


@torch.no_grad()
def fill(tensor: Tensor, whole: Whole) -> None:
    """Copy this process's part of `whole` into `tensor`; DamagedError if it is none of its kind."""
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
    """What each process holds of `tensor`, by rank."""
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
    """Which copy of `tensor` the part of each process belongs to, by rank: those of one copy hold
    the whole between them."""
    if not isinstance(tensor, DTensor):
        return {rank: (rank,) for rank in boxes(tensor)}
    mesh = tensor.device_mesh
    repeated = [placement.is_replicate() for placement in tensor.placements]
    places = product(*(range(size) for size in mesh.shape))
    return {int(mesh.mesh[place]): tuple(compress(place, repeated)) for place in places}


def _box(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], place: Sequence[int]
) -> Box:
    """The part at `place` in a mesh of `sizes`.

    Each cut is that of `torch.chunk`. FSDP2 cuts what tensor parallelism has cut already, though
    its dimension of the mesh comes first: torch marks these placements as strided.
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
    """Zeros of a shape that lies as `parameter` does, where it has its size, and is 1 elsewhere.

    As the state of optimizers: one number for each weight, or for each row.
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
    """Whether a tensor of `shape` is still cut by `placement`: in a dimension of 1 there is nothing
    to cut."""
    return not placement.is_replicate() and shape[placement.dim] > 1


def as_cut(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """The tensor of `shape` of which each process gives its part."""
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    cut: DTensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return cut
