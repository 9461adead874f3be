"""The device mesh, and this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtt.config.parallel import Sizes
from dtt.mesh.dist import World

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run.

    Ranks are ordered with `tensor` as the fastest-varying dimension, then `context`, `shard` and
    `replicate`, so that ranks that communicate most are close to each other.
    """

    sizes: Sizes = field(default_factory=Sizes)
    rank: int = 0
    mesh: DeviceMesh | None = None
    """Mesh of `replicate` (unless 1), `shard` (times context) and `tensor` (unless 1); None unless
    parameters are sharded."""
    context_group: ProcessGroup | None = None
    """Process group of the ranks that share this rank's sequences; None without context
    parallelism."""

    world: World | None = None
    """Communication with the other ranks; None with a single one."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def sharded(self) -> bool:
        """True if parameters are DTensors, of which each rank holds a shard."""
        return self.mesh is not None

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: the index of this rank's part of each batch, below `sizes.data`."""
        return self.rank // (self.sizes.context * self.sizes.tensor)

    @property
    def context_rank(self) -> int:
        """Context-parallel rank: the index of this rank's part of each sequence."""
        return self.rank // self.sizes.tensor % self.sizes.context

    @property
    def gradient_replicas(self) -> int:
        """Number of ranks over which the gradients of one weight are averaged."""
        return self.sizes.data * self.sizes.context

    @property
    def granularity(self) -> int:
        """Number of tokens that sequence lengths must be a multiple of.

        With context parallelism it is 1, as `ContextParallel` pads sequences itself.
        """
        return self.sizes.tensor if self.sizes.context == 1 else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank; a host-side collective."""
        return [value] if self.world is None else self.world.gather(value)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the ranks that compute a loss, on every rank.

        All ranks compute one. `values` is on this rank's device; it is overwritten.
        """
        # Every rank of a tensor group has the same loss, and each of a context group a part of it
        # scaled to a mean. So one average over all ranks is the mean for every layout.
        if self.size > 1:
            dist.all_reduce(values)
        return values / self.size

    def part(self, *names: str) -> DeviceMesh:
        """Return the sub-mesh of these dimensions."""
        assert self.mesh is not None
        return self.mesh[names if len(names) > 1 else names[0]]


def make_layout(sizes: Sizes, world: World) -> Layout:
    """Create the mesh and its process groups; all ranks call this together."""
    if not sizes.sharded:
        return Layout(sizes, world.rank, world=world)
    # Context ranks have different tokens and the same weights, as data ranks do. So they join the
    # sharding: with context parallelism FSDP2 spreads weights over more ranks.
    spread = sizes.shard * sizes.context
    dims = {"replicate": sizes.replicate, "shard": spread, "tensor": sizes.tensor}
    # A `replicate` dimension of size 1 would turn FSDP2 into HSDP. `shard` stays, as DTensors need
    # a mesh.
    dims = {name: size for name, size in dims.items() if size > 1 or name == "shard"}
    kind = world.device.type
    mesh = init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))
    group = None
    if sizes.context > 1:
        inner = (sizes.data, sizes.context, sizes.tensor)
        # A second mesh over the same ranks: the first one has merged context into `shard`, and a
        # group of context ranks alone is needed for keys and values.
        contexts = init_device_mesh(kind, inner, mesh_dim_names=("data", "context", "tensor"))
        group = contexts.get_group("context")
    return Layout(sizes, world.rank, mesh, group, world)
