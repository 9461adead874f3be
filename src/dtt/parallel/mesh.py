"""The mesh of devices, and this process's place in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtt.config.parallel import Sizes
from dtt.runtime.dist import World


@dataclass(frozen=True)
class Layout:
    """How a run is laid out over its processes. From rank to rank tensor changes fastest, then
    context, then shard, then replicate: ranks that talk much are near each other."""

    sizes: Sizes = field(default_factory=Sizes)
    rank: int = 0
    mesh: DeviceMesh | None = None
    """Of `replicate` (unless 1), `shard` (times context) and `tensor` (unless 1), where a device
    holds less than the whole model."""
    context_group: ProcessGroup | None = None
    """The ranks that share this one's sequences."""

    @property
    def sharded(self) -> bool:
        """Whether parameters are DTensors, each process holding a part."""
        return self.mesh is not None

    @property
    def data_rank(self) -> int:
        """Which share of every batch is this process's, of `sizes.data`."""
        return self.rank // (self.sizes.context * self.sizes.tensor)

    @property
    def context_rank(self) -> int:
        """Which part of every sequence is this process's."""
        return self.rank // self.sizes.tensor % self.sizes.context

    @property
    def copies(self) -> int:
        """Processes over which the gradients of one weight are averaged."""
        return self.sizes.data * self.sizes.context

    @property
    def granularity(self) -> int:
        """What the length of a sequence must be a multiple of; those that share the context pad
        it themselves."""
        return self.sizes.tensor if self.sizes.context == 1 else 1

    def part(self, *names: str) -> DeviceMesh:
        """The mesh of these dimensions alone."""
        assert self.mesh is not None
        return self.mesh[names if len(names) > 1 else names[0]]


def make_layout(sizes: Sizes, world: World) -> Layout:
    """Join the process groups of the mesh; all ranks together."""
    if not sizes.sharded:
        return Layout(sizes, world.rank)
    spread = sizes.shard * sizes.context
    dims = {"replicate": sizes.replicate, "shard": spread, "tensor": sizes.tensor}
    dims = {name: size for name, size in dims.items() if size > 1 or name == "shard"}
    kind = world.device.type
    mesh = init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))
    group = None
    if sizes.context > 1:
        inner = (sizes.data, sizes.context, sizes.tensor)
        contexts = init_device_mesh(kind, inner, mesh_dim_names=("data", "context", "tensor"))
        group = contexts.get_group("context")
    return Layout(sizes, world.rank, mesh, group)
