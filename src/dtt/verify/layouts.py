"""The layouts that `dtt verify` compares: each dimension of the configured mesh reduced to 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from dtt.config.parallel import REST, Sizes
from dtt.config.run import RunConfig

MOST_RANKS = 8
"""Number of processes that one machine runs at the same time. Five dimensions of 2 would be 32."""


@dataclass(frozen=True)
class Layout:
    """A mesh of processes on this machine."""

    sizes: Sizes = field(default_factory=Sizes)
    stages_per_rank: int = 1
    """That of the pipeline, if there is one."""
    expert: int = 1
    """Number of the ranks of shard, context and tensor that share experts."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return prod(self.sizes)

    @property
    def name(self) -> str:
        """Name in the output, such as `shard 2 x tensor 2`."""
        named = zip(self.sizes._fields, self.sizes, strict=True)
        name = " x ".join(f"{dim} {size}" for dim, size in named if size > 1) or "one process"
        if self.stages_per_rank > 1:
            ranks = f"pipeline {self.sizes.pipeline}"
            name = name.replace(ranks, f"{ranks} of {self.stages_per_rank} stages")
        return name if self.expert == 1 else f"{name} with expert {self.expert}"

    @property
    def dims(self) -> list[str]:
        """Names of the dimensions above 1."""
        sizes = self.sizes._asdict() | {"expert": self.expert}
        return [dim for dim, size in sizes.items() if size > 1]

    @property
    def section(self) -> dict[str, int]:
        """The keys of `parallel` that select the layout."""
        others = {"stages_per_rank": self.stages_per_rank, "expert": self.expert}
        return self.sizes._asdict() | others

    def without(self, dim: str) -> Layout:
        """Return the layout with the size 1 of one dimension."""
        if dim == "expert":
            return replace(self, expert=1)
        stages = 1 if dim == "pipeline" else self.stages_per_rank
        sizes = self.sizes._replace(**{dim: 1})
        # Ranks that share experts are some of these.
        return Layout(sizes, stages, min(self.expert, sizes.shard * sizes.context * sizes.tensor))


REFERENCE = Layout()


def layouts_of(cfg: RunConfig, most: int = MOST_RANKS) -> list[Layout]:
    """Return the layouts to compare with one process, the smallest first.

    They are the configured mesh with each size above 1 reduced to 2, and, if it has several
    dimensions, the same without each of them. A size of -1 counts as 2 unless the number of
    processes that `launch` describes leaves 1 for it. A run of one process is compared with
    itself: it accumulates gradients over micro-batches, which the reference does not. Layouts of
    more than `most` processes are left out.
    """
    reduced = reduced_layout(cfg)
    parts = [reduced.without(dim) for dim in reduced.dims] if len(reduced.dims) > 1 else []
    found = [x for x in dict.fromkeys([reduced, *parts]) if x.ranks <= most]
    # Of layouts with as many ranks, the one that shares experts last.
    return sorted(found, key=lambda x: (x.ranks, x.expert)) or [REFERENCE]


def reduced_layout(cfg: RunConfig) -> Layout:
    """Return the configured mesh with each size above 1 reduced to 2."""
    sizes = Sizes(**{dim: 1 if n == 1 else 2 for dim, n in configured(cfg).items()})
    return Layout(sizes, min(2, cfg.parallel.stages_per_rank), min(2, cfg.parallel.expert))


def not_covered(cfg: RunConfig, most: int = MOST_RANKS) -> Iterator[str]:
    """Yield what the layouts of `layouts_of` leave out."""
    for dim, size in configured(cfg).items():
        if size > 2 or size == REST:
            yield f"parallel.{dim}={size} (reduced to 2)"
    if cfg.parallel.expert > 2:
        yield f"parallel.expert={cfg.parallel.expert} (reduced to 2)"
    reduced = reduced_layout(cfg)
    if reduced.ranks > most:
        yield f"{reduced.name} at the same time ({reduced.ranks} processes)"


def configured(cfg: RunConfig) -> dict[str, int]:
    """Return the configured size of each dimension; -1 if it takes any number of processes."""
    sizes = cfg.parallel.sizes
    processes = cfg.launch.nodes * cfg.launch.processes
    known = prod(size for size in sizes.values() if size != REST)
    if processes == 1 or processes % known:
        return sizes  # `launch` does not say how the run is started
    return {dim: processes // known if n == REST else n for dim, n in sizes.items()}
