"""Keys of the device mesh: pipeline stages, replicas, shards, context and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from dtt.base.errors import ConfigError
from dtt.config.base import Section, resumable

MeshSize = Annotated[int, Field(ge=-1)]
REST = -1
"""The size that makes the product of all sizes equal the number of processes."""


class ParallelConfig(Section):
    """The device mesh.

    The number of devices is the product of the five sizes; one of them may be -1 and takes the
    remaining devices. The loss curve does not depend on the mesh.
    """

    pipeline: MeshSize = resumable(1)
    """Number of devices that share the layers: each computes some of them, and passes activations
    on (pipeline parallelism). For models whose weights are too large to be gathered for every
    micro-batch. A step needs at least as many micro-batches as there are devices."""
    stages_per_rank: Annotated[int, Field(ge=1)] = resumable(1)
    """Number of pipeline stages of each device. With 1 the schedule is 1F1B; with more it is the
    interleaved one, which waits less and communicates more."""
    layers_per_stage: tuple[Annotated[int, Field(ge=1)], ...] | None = resumable(None)
    """Number of layers of each pipeline stage, from the embedding to the head; null divides them
    evenly."""
    replicate: MeshSize = resumable(REST)
    """Number of model replicas, each training on its own samples: data parallelism (DDP), or hybrid
    sharding (HSDP) if `shard` is above 1, where each replica spans several devices."""
    shard: MeshSize = resumable(1)
    """Number of devices that share the weights, gradients and optimizer state of a replica (FSDP2);
    each trains on its own samples."""
    context: MeshSize = resumable(1)
    """Number of devices that share each sequence (context parallelism), for contexts too long for
    one device. Weights are sharded over them as over `shard`."""
    tensor: MeshSize = resumable(1)
    """Number of devices that share each matrix multiplication, and the sequence in between (tensor
    and sequence parallelism). They communicate a lot: keep them on one node."""
    expert: Annotated[int, Field(ge=1)] = resumable(1)
    """Number of devices that share the experts of a mixture: each has some of them, and tokens
    travel to theirs (expert parallelism). It divides shard x context x tensor, and no device is
    added."""
    reduce: Literal["auto", "last", "each"] = resumable("auto")
    """Time at which sharded gradients are reduced over devices: after the `last` micro-batch of a
    step, before which each device holds the gradient of the full model; or after `each`, which
    takes less memory and more communication. `auto`: `last` where these gradients, in fp32, take at
    most a quarter of the memory of a device."""
    reshard: bool = resumable(True)
    """Free gathered weights after the forward pass and gather them again for the backward pass:
    less memory, 50% more communication."""

    @property
    def sizes(self) -> dict[str, int]:
        """The configured sizes by name, from the outermost mesh dimension to the innermost.

        Consecutive ranks differ in `tensor` first and in `pipeline` last.
        """
        names = ("pipeline", "replicate", "shard", "context", "tensor")
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
        yield from self._stage_problems()

    def _stage_problems(self) -> Iterator[tuple[str, str]]:
        """Yield errors of the pipeline's stages, but for those that depend on the model."""
        if self.pipeline == 1:
            for name in ("stages_per_rank", "layers_per_stage"):
                if getattr(self, name) not in (1, None):
                    yield name, "there is no pipeline: set parallel.pipeline"
        elif self.pipeline == REST:
            yield "pipeline", "the number of stages must be known: -1 is for another size"
        elif self.layers_per_stage is not None and len(self.layers_per_stage) != self.stages:
            given = len(self.layers_per_stage)
            yield "layers_per_stage", f"{given} numbers for {self.stages} stages"

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * self.stages_per_rank

    def stage_layers(self, n_layers: int) -> list[range]:
        """Return the layers of each stage, of a model with `n_layers`.

        An even division gives stages in the middle one more where it leaves a rest, because the
        first one also has the embedding, and the last one the head.
        """
        each, rest = divmod(n_layers, self.stages)
        first = (self.stages - rest) // 2
        even = [each + (first <= stage < first + rest) for stage in range(self.stages)]
        ends = accumulate(self.layers_per_stage or even, initial=0)
        return [range(*pair) for pair in pairwise(ends)]


class Sizes(NamedTuple):
    """The sizes of a resolved mesh."""

    pipeline: int = 1
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
        return self.pipeline * self.shard * self.context * self.tensor > 1

    def describe(self) -> str:
        """Return a description of the sizes; empty for a single device."""
        names = ("pipeline ranks", "replicas", "shards", "contexts", "tensors")
        named = zip(names, self, strict=True)
        return " x ".join(f"{size} {name}" for name, size in named if size > 1)


def mesh_sizes(config: ParallelConfig, processes: int) -> Sizes:
    """Return the mesh of this number of processes; ConfigError if the sizes do not fit it."""
    given = config.sizes
    rest = next((name for name, size in given.items() if size == REST), None)
    known = prod(size for size in given.values() if size != REST)
    if processes % known or (rest is None and known != processes):
        sizes_given = ", ".join(f"{name} {size}" for name, size in given.items() if size != REST)
        divided = ("pipeline", "context", "tensor")
        others = "".join(f" parallel.{n}=1" for n in divided if given[n] != 1)
        raise ConfigError(
            f"{processes} processes do not make the mesh of `parallel`",
            why=f"{sizes_given}: {'a multiple of ' if rest else ''}{known} processes",
            next=f"start {known} processes, or change the sizes: parallel.shard=-1 "
            f"parallel.replicate=1{others} takes any number",
        )
    return Sizes(**{name: processes // known if name == rest else given[name] for name in given})
