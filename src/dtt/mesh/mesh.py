"""The device mesh: named dimensions of ranks, their groups, and what is summed over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtt.config.parallel import Sizes
from dtt.mesh.dist import World

T = TypeVar("T")
Dim = Literal["pipeline", "replicate", "shard", "context", "tensor"]
"""Dimension of the mesh. Expert parallelism is another view of the same ranks: `Mesh.experts`."""
ALL: tuple[Dim, ...] = "pipeline", "replicate", "shard", "context", "tensor"
"""Dimensions from the outermost to the innermost. `tensor` varies fastest from rank to rank, so
that ranks that communicate most are close to each other."""
DATA: tuple[Dim, ...] = "replicate", "shard"
"""Dimensions whose ranks have different samples. The other ranks share them."""
LOSS: tuple[Dim, ...] = *DATA, "context"
"""Dimensions whose ranks have different parts of the loss. Over `tensor` it is the same, and over
`pipeline` the step makes it so."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, by named dimensions, and this rank's place among them."""

    sizes: Sizes = field(default_factory=Sizes)
    rank: int = 0
    model: DeviceMesh | None = None
    """Mesh of the DTensors: `replicate` (unless 1), `shard` (times context) and `tensor` (unless
    1); None unless parameters are sharded. In a pipeline, those of this rank's place in it."""
    experts: DeviceMesh | None = None
    """Mesh of the DTensors of experts: `replicate` (unless 1), `expert_shard` and `expert` (unless
    1), which together have the ranks of `shard`, context and tensor. None if experts are sharded as
    other weights are."""
    world: World | None = None
    """Communication with the other ranks; None with a single one."""
    _groups: dict[tuple[tuple[Dim, ...], bool], ProcessGroup] = field(
        default_factory=dict, compare=False
    )

    @property
    def sharded(self) -> bool:
        """True if parameters are DTensors, of which each rank holds a shard."""
        return self.model is not None

    @property
    def gradient_replicas(self) -> int:
        """Number of ranks over which the gradients of one weight are averaged."""
        return self.size(*LOSS)

    @property
    def granularity(self) -> int:
        """Number of tokens that sequence lengths must be a multiple of.

        With context parallelism it is 1, as `ContextParallel` pads sequences itself.
        """
        return self.sizes.tensor if self.sizes.context == 1 else 1

    def size(self, *dims: Dim) -> int:
        """Return the number of ranks along `dims`."""
        return prod(getattr(self.sizes, dim) for dim in dims)

    def index(self, *dims: Dim) -> int:
        """Return the index of this rank along `dims`, in the order of `ALL`."""
        index, rest, scale = 0, self.rank, 1
        for dim in reversed(ALL):
            rest, at = divmod(rest, self.size(dim))
            if dim in dims:
                index += scale * at
                scale *= self.size(dim)
        return index

    def group(self, *dims: Dim, on_host: bool = False) -> ProcessGroup:
        """Return the group of the ranks that differ from this one along `dims` only.

        Its first use is a collective of all ranks. `on_host` is for objects instead of tensors.
        """
        key = tuple(dim for dim in ALL if dim in dims), on_host
        if key not in self._groups:
            # One row for each group. Every rank creates all of them, as torch requires.
            places = [ALL.index(dim) for dim in (*(d for d in ALL if d not in dims), *key[0])]
            ranks = torch.arange(self.size(*ALL)).view(self.sizes).permute(places)
            groups = ranks.reshape(-1, self.size(*dims)).tolist()
            backend = "gloo" if on_host else None
            group, _ = dist.new_subgroups_by_enumeration(groups, backend=backend)  # type: ignore[no-untyped-call]
            assert group is not None, "each rank is in one of the groups"
            self._groups[key] = group
        return self._groups[key]

    def sum(self, values: Tensor, over: Sequence[Dim] = ALL) -> Tensor:
        """Return the sum over the ranks along `over`, on every rank; `values` is overwritten.

        `values` is on this rank's device. Leave out dimensions whose ranks have copies.
        """
        ranks = self.size(*over)
        if ranks > 1:
            everyone = ranks == self.size(*ALL)
            dist.all_reduce(values, group=None if everyone else self.group(*over))
        return values

    def mean(self, values: Tensor, over: Sequence[Dim] = ALL) -> Tensor:
        """Return the mean over the ranks along `over`, on every rank; `values` is overwritten.

        The mean over all ranks is bitwise equal on them, and that of a loss for every layout: along
        `tensor` ranks have the same loss, and along `context` and `pipeline` parts of it, scaled to
        a mean.
        """
        return self.sum(values, over) / self.size(*over)

    def gather(self, value: T, over: Sequence[Dim] = ALL) -> list[T]:
        """Return the objects of the ranks along `over`, in their order; a host-side collective."""
        ranks = self.size(*over)
        if self.world is None or ranks == 1:
            return [value]
        if ranks == self.world.size:
            return self.world.gather(value)
        values: list[T] = [value] * ranks
        dist.all_gather_object(values, value, group=self.group(*over, on_host=True))
        return values

    @property
    def expert_replicas(self) -> int | None:
        """Number of ranks over which the gradients of an expert are averaged.

        None: as many as those of other weights. An expert has seen the tokens of all ranks that
        send it some, so FSDP2 averages over fewer.
        """
        if self.experts is None:
            return None
        names = self.experts.mesh_dim_names or ()
        return prod(self.experts[name].size() for name in names if name != "expert")

    def part(self, *names: str) -> DeviceMesh:
        """Return the sub-mesh of `model` of these dimensions."""
        assert self.model is not None
        return self.model[names if len(names) > 1 else names[0]]


def make_mesh(sizes: Sizes, world: World, expert: int | None = None) -> Mesh:
    """Create the mesh; all ranks call this together.

    `expert` is the number of ranks that share the experts of a mixture; None: the model has none.
    """
    if not sizes.sharded:
        return Mesh(sizes, world.rank, world=world)
    # Context ranks have different tokens and the same weights, as data ranks do. So they join the
    # sharding: with context parallelism FSDP2 spreads weights over more ranks.
    spread = sizes.shard * sizes.context
    dims = {
        "pipeline": sizes.pipeline, "replicate": sizes.replicate, "shard": spread,
        "tensor": sizes.tensor,
    }  # fmt: skip
    experts = None
    if expert is not None and not expert == sizes.tensor == 1:
        # Tensor-parallel ranks have different tokens where the experts are, so they join the
        # sharding as context ranks do. `expert` varies fastest: these ranks communicate in every
        # layer.
        shards = spread * sizes.tensor // expert
        of_experts = {
            "pipeline": sizes.pipeline, "replicate": sizes.replicate, "expert_shard": shards,
            "expert": expert,
        }  # fmt: skip
        experts = _device_mesh(world, of_experts, kept="expert_shard")
    return Mesh(sizes, world.rank, _device_mesh(world, dims, kept="shard"), experts, world)


def _device_mesh(world: World, dims: dict[str, int], kept: str) -> DeviceMesh:
    """Return the mesh of these dimensions, `pipeline` first, in which this rank's stage is.

    Those of size 1 are left out, but `kept`, as DTensors need a mesh: a `replicate` dimension of
    size 1 would turn FSDP2 into HSDP.
    """
    dims = {name: size for name, size in dims.items() if size > 1 or name == kept}
    names = tuple(dims)
    mesh = init_device_mesh(world.device.type, tuple(dims.values()), mesh_dim_names=names)
    if "pipeline" not in names:
        return mesh
    mesh = mesh[names[1:]]
    if mesh.ndim > 1:
        # Creates the group of all its ranks, which `TensorLayout.group` returns.
        mesh._flatten()  # noqa: SLF001  (it has no public name)
    return mesh
