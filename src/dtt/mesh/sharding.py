"""Layout of tensors over ranks: the ranks that hold a tensor, and the part that each of them holds.

torch's DTensor describes a tensor by its placements on the dimensions of a mesh: sharded (`Shard`)
or replicated (`Replicate`). `layout_of` converts them to ranks and boxes. A plain tensor does not
say which ranks hold it, so whoever made it does. A rank that does not hold a tensor has no object
for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress, product
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtt.base.errors import DamagedError


class TensorSlice(NamedTuple):
    """A rectangular part of a tensor: its offset and shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """The ranks that hold a tensor, and how it is sharded over them."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks that hold the tensor or a shard of it, in the row-major order of the mesh."""
    placements: tuple[Any, ...]
    """Placement on each dimension of the mesh, as in torch's DTensor."""
    mesh: DeviceMesh | None = None
    """Mesh of these ranks; None: they are all ranks of the process group."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks; None means all ranks.

        That of a mesh of some of the ranks with several dimensions must have been created by all
        of them before, as `make_mesh` does.
        """
        if self.mesh is None or self.mesh.size() == world_size():
            return None
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()  # noqa: SLF001
        group: dist.ProcessGroup = mesh.get_group()
        return group

    def box(self, rank: int) -> TensorSlice:
        """Return the part of the tensor that `rank` holds."""
        return _box(self.shape, self.placements, self.mesh_shape, self._coordinate(rank))

    @cached_property
    def boxes(self) -> Mapping[int, TensorSlice]:
        """The part of the tensor that each rank holds, by rank."""
        return {rank: self.box(rank) for rank in self.ranks}

    @cached_property
    def replicas(self) -> Mapping[int, tuple[int, ...]]:
        """The replica of the tensor to which the part of each rank belongs, by rank.

        Ranks with equal values hold one full tensor together.
        """
        replicated = [placement.is_replicate() for placement in self.placements]
        return {rank: tuple(compress(self._coordinate(rank), replicated)) for rank in self.ranks}

    @property
    def replica_count(self) -> int:
        """Number of ranks that hold the same part."""
        dims = zip(self.mesh_shape, self.placements, strict=True)
        return prod(size for size, placement in dims if placement.is_replicate())

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part as `rank`, including `rank` itself."""
        # The usual case, without a loop over the mesh.
        if self.replica_count == len(self.ranks):
            return self.ranks
        place = zip(self._coordinate(rank), self.mesh_shape, self.placements, strict=True)
        ranges = [range(size) if p.is_replicate() else (at,) for at, size, p in place]
        return tuple(
            self.ranks[np.ravel_multi_index(at, self.mesh_shape)] for at in product(*ranges)
        )

    @property
    def largest_fraction(self) -> float:
        """Fraction of the tensor held by the rank that holds most, 0 to 1."""
        return max(prod(box.shape) for box in self.boxes.values()) / prod(self.shape)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of `rank` in the mesh."""
        return tuple(map(int, np.unravel_index(self.ranks.index(rank), self.mesh_shape)))


def layout_of(tensor: Tensor, holders: DeviceMesh | int) -> TensorLayout:
    """Return the layout of a tensor.

    `holders` hold all of it if it is a plain tensor: a mesh, or that many ranks, which are all that
    there are.
    """
    if isinstance(tensor, DTensor):
        return _on_mesh(tensor.shape, tensor.device_mesh, tuple(tensor.placements))
    if isinstance(holders, DeviceMesh):
        return _on_mesh(tensor.shape, holders, (Replicate(),) * holders.ndim)
    return TensorLayout(tuple(tensor.shape), (holders,), tuple(range(holders)), (Replicate(),))


# Cached, because a model has few shapes and many tensors of each, and each layout caches its boxes.
@cache
def _on_mesh(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Any, ...]) -> TensorLayout:
    ranks = tuple(mesh.mesh.flatten().tolist())
    return TensorLayout(tuple(shape), tuple(mesh.shape), ranks, placements, mesh)


class LaidOut(Protocol):
    """A tensor with its layout, such as a parameter."""

    @property
    def tensor(self) -> Tensor:
        """A DTensor, or a plain tensor that its ranks hold completely."""

    @property
    def layout(self) -> TensorLayout:
        """The ranks that hold it."""


class Placed(NamedTuple):
    """A tensor with its layout that is not a parameter."""

    tensor: Tensor
    layout: TensorLayout


def on_every_rank(tensors: Mapping[str, Tensor], size: int | None = None) -> dict[str, Placed]:
    """Return tensors that are equal on all `size` ranks; None: all of the process group."""
    ranks = world_size() if size is None else size
    return {name: Placed(tensor, layout_of(tensor, ranks)) for name, tensor in tensors.items()}


def on_this_rank(tensors: Mapping[str, Tensor]) -> dict[str, Placed]:
    """Return tensors that only this rank holds, under names that no other rank uses."""
    alone = (1,), (this_rank(),), (Replicate(),)
    return {name: Placed(t, TensorLayout(tuple(t.shape), *alone)) for name, t in tensors.items()}


def world_size() -> int:
    """Return the number of ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """Return the rank of this process in the process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


class LocalShard(NamedTuple):
    """The part of a tensor that this rank holds."""

    local: Tensor
    box: TensorSlice
    shape: tuple[int, ...]
    """Shape of the full tensor."""


class FullTensor(Protocol):
    """A full tensor, in memory or in files, that can be read by index."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Return a part of the tensor; with (), all of it."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory; a plain tensor is returned as is."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def local_summand(weight: Tensor) -> Tensor:
    """Return all of a weight that tensor-parallel ranks use for their own tokens.

    Its gradient on each rank is a summand. A plain tensor is returned as is.
    """
    if not isinstance(weight, DTensor):
        return weight
    whole: Tensor = weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)
    return whole


def local_shard(tensor: Tensor) -> LocalShard:
    """Return the part of `tensor` that this rank holds."""
    if isinstance(tensor, DTensor):
        layout = layout_of(tensor, tensor.device_mesh)
        return LocalShard(local(tensor), layout.box(this_rank()), layout.shape)
    # A rank that has a plain tensor has all of it, whichever ranks do.
    shape = tuple(tensor.shape)
    return LocalShard(tensor, TensorSlice((0,) * len(shape), shape), shape)


@torch.no_grad()
def fill(tensor: Tensor, full: FullTensor) -> None:
    """Copy this rank's part of `full` into `tensor`.

    Raises DamagedError if their shapes differ, or if only one of them is floating-point.
    """
    part = local_shard(tensor)
    alike = full.dtype.is_floating_point == tensor.dtype.is_floating_point
    if tuple(full.shape) != part.shape or not alike:
        raise DamagedError(
            "the shape or dtype of a checkpoint tensor does not match the model",
            why=f"it is {list(full.shape)} of {full.dtype}, not {list(part.shape)} of "
            f"{tensor.dtype}",
        )
    part.local.copy_(full[part.box.slices])


def _box(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], place: Sequence[int]
) -> TensorSlice:
    """Return the part at coordinates `place` of a mesh of shape `sizes`.

    Each dimension is split as `torch.chunk` does. FSDP2 splits what tensor parallelism has already
    split, although its mesh dimension comes first: torch marks such placements as strided.
    """
    offset, extent = [0] * len(shape), list(shape)
    cuts = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    # The order decides which elements a rank holds where two mesh dimensions split one dimension.
    # Tensor parallelism first: FSDP2 marks its shards of sharded tensors with a `split_factor`.
    for i in sorted(cuts, key=lambda i: hasattr(placements[i], "split_factor")):
        dim = placements[i].dim
        rows = -(-extent[dim] // sizes[i])
        # torch.chunk gives the last ranks fewer rows, or none. `first` then ends at the extent.
        first = min(rows * place[i], extent[dim])
        offset[dim] += first
        extent[dim] = min(rows, extent[dim] - first)
    return TensorSlice(tuple(offset), tuple(extent))


def zeros_sharded_as(parameter: Tensor, shape: Sequence[int], **how: Any) -> Tensor:
    """Return zeros of `shape`, sharded as `parameter` is in all dimensions of its size but 1.

    Optimizer states have one number per weight, or one per row or per block of a row. What has
    another size than the parameter in a dimension is whole in it on every rank.
    """
    assert all(n <= full for n, full in zip(shape, parameter.shape, strict=True))
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(tuple(shape), **how)
    mesh = parameter.device_mesh
    # An optimizer state with one number per row has 1 column, which cannot be split.
    whole = [1 < n == full for n, full in zip(shape, parameter.shape, strict=True)]
    given: Sequence[Any] = parameter.placements
    placements = [p if not p.is_replicate() and whole[p.dim] else Replicate() for p in given]
    box = _box(shape, placements, mesh.shape, mesh.get_coordinate() or ())
    return from_local(local(parameter).new_zeros(box.shape, **how), mesh, placements, shape)


def from_local(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of `shape` from each rank's local part."""
    # Given explicitly, because from_local would derive them from an even split.
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    tensor: DTensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return tensor
