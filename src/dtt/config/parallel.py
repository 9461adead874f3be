"""How many devices share what: copies of the model, shards of it, contexts, tensors."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from dtt.config.base import Section, free
from dtt.errors import ConfigError

Size = Annotated[int, Field(ge=-1)]
REST = -1
"""What the other sizes leave."""


class ParallelConfig(Section):
    """A mesh of devices. Their number is the product of the four sizes; -1, for one of them: what
    the others leave. The loss curve is the same for every mesh."""

    replicate: Size = free(REST)
    """Copies of the model that each train on samples of their own: data parallelism (DDP), or with
    `shard` its hybrid form (HSDP), where a copy lies on so many devices."""
    shard: Size = free(1)
    """Devices over which weights, gradients and optimizer state of a copy are spread (FSDP2), and
    which each train on samples of their own."""
    context: Size = free(1)
    """Devices that share each sequence, for contexts too long for one. Weights are spread over them
    as over `shard`."""
    tensor: Size = free(1)
    """Devices that share each matrix product, and between these the sequence (tensor and sequence
    parallelism). They talk much: keep them on one node."""
    reduce: Literal["last", "each"] = free("last")
    """When sharded gradients are summed over devices: after the `last` micro-batch of a step, for
    which each device keeps the gradient of the whole model; or after `each`, which takes less
    memory and more communication."""
    reshard: bool = free(True)
    """Whether weights that were gathered for a forward pass are let go until the backward pass:
    less memory, half as much communication again."""

    @property
    def sizes(self) -> dict[str, int]:
        """As given, by name; replicate changes slowest from rank to rank, tensor fastest."""
        names = ("replicate", "shard", "context", "tensor")
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[tuple[str, str]]:
        """One size can be what is left, none can be nothing."""
        for name, size in self.sizes.items():
            if size == 0:
                yield name, "0 devices: 1 leaves it off, -1 takes what is left"
        rest = [name for name, size in self.sizes.items() if size == REST]
        if len(rest) > 1:
            why = f"{' and '.join(rest)} cannot both be -1"
            yield rest[-1], why + (": add parallel.replicate=1" if "replicate" in rest else "")


class Sizes(NamedTuple):
    """A mesh, resolved."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """Ways in which a global batch is divided."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> bool:
        """Whether a device holds less than the whole model."""
        return self.shard * self.context * self.tensor > 1

    def describe(self) -> str:
        """In words; empty for a single device."""
        named = zip(("replicas", "shards", "contexts", "tensors"), self, strict=True)
        return " x ".join(f"{size} {name}" for name, size in named if size > 1)


def resolve(config: ParallelConfig, processes: int) -> Sizes:
    """The mesh of so many processes; ConfigError if they do not make one."""
    given = config.sizes
    rest = next((name for name, size in given.items() if size == REST), None)
    known = prod(size for size in given.values() if size != REST)
    if processes % known or (rest is None and known != processes):
        told = ", ".join(f"{name} {size}" for name, size in given.items() if size != REST)
        others = "".join(f" parallel.{n}=1" for n in ("context", "tensor") if given[n] != 1)
        raise ConfigError(
            f"{processes} processes do not make the mesh of `parallel`",
            why=f"{told}: {'a multiple of ' if rest else ''}{known} processes",
            next=f"start {known} processes, or change the sizes: parallel.shard=-1 "
            f"parallel.replicate=1{others} takes any number",
        )
    return Sizes(**{name: processes // known if name == rest else given[name] for name in given})
