"""Keys of the device mesh: replicas, shards, context parallelism and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from dtt.base.errors import ConfigError
from dtt.config.base import Section, resumable

Size = Annotated[int, Field(ge=-1)]
REST = -1
"""The size that makes the product of all sizes equal the number of processes."""


class ParallelConfig(Section):
    """The device mesh.

    The number of devices is the product of the four sizes; one of them may be -1 and takes the
    remaining devices. The loss curve does not depend on the mesh.
    """

    replicate: Size = resumable(REST)
    """Number of model replicas, each training on its own samples: data parallelism (DDP), or hybrid
    sharding (HSDP) if `shard` is above 1, where each replica spans several devices."""
    shard: Size = resumable(1)
    """Number of devices that share the weights, gradients and optimizer state of a replica (FSDP2);
    each trains on its own samples."""
    context: Size = resumable(1)
    """Number of devices that share each sequence (context parallelism), for contexts too long for
    one device. Weights are sharded over them as over `shard`."""
    tensor: Size = resumable(1)
    """Number of devices that share each matrix multiplication, and the sequence in between (tensor
    and sequence parallelism). They communicate a lot: keep them on one node."""
    reduce: Literal["last", "each"] = resumable("last")
    """Time at which sharded gradients are reduced over devices: after the `last` micro-batch of a
    step, before which each device holds the gradient of the full model; or after `each`, which
    takes less memory and more communication."""
    reshard: bool = resumable(True)
    """Free gathered weights after the forward pass and gather them again for the backward pass:
    less memory, 50% more communication."""

    @property
    def sizes(self) -> dict[str, int]:
        """The configured sizes by name, from the outermost mesh dimension to the innermost.

        Consecutive ranks differ in `tensor` first and in `replicate` last.
        """
        names = ("replicate", "shard", "context", "tensor")
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for sizes of 0 and for more than one -1."""
        for name, size in self.sizes.items():
            if size == 0:
                yield name, "0 devices: 1 disables it, -1 uses the remaining devices"
        rest = [name for name, size in self.sizes.items() if size == REST]
        if len(rest) > 1:
            why = f"{' and '.join(rest)} cannot both be -1"
            yield rest[-1], why + (": add parallel.replicate=1" if "replicate" in rest else "")


class Sizes(NamedTuple):
    """The sizes of a resolved mesh."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """The number of data-parallel ranks, which divide a global batch."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> bool:
        """True if a device holds less than the full model."""
        return self.shard * self.context * self.tensor > 1

    def describe(self) -> str:
        """Return a description of the sizes; empty for a single device."""
        named = zip(("replicas", "shards", "contexts", "tensors"), self, strict=True)
        return " x ".join(f"{size} {name}" for name, size in named if size > 1)


def resolve(config: ParallelConfig, processes: int) -> Sizes:
    """Return the mesh of this number of processes; ConfigError if the sizes do not fit it."""
    given = config.sizes
    rest = next((name for name, size in given.items() if size == REST), None)
    known = prod(size for size in given.values() if size != REST)
    if processes % known or (rest is None and known != processes):
        sizes_given = ", ".join(f"{name} {size}" for name, size in given.items() if size != REST)
        others = "".join(f" parallel.{n}=1" for n in ("context", "tensor") if given[n] != 1)
        raise ConfigError(
            f"{processes} processes do not make the mesh of `parallel`",
            why=f"{sizes_given}: {'a multiple of ' if rest else ''}{known} processes",
            next=f"start {known} processes, or change the sizes: parallel.shard=-1 "
            f"parallel.replicate=1{others} takes any number",
        )
    return Sizes(**{name: processes // known if name == rest else given[name] for name in given})
