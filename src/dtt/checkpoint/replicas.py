"""Comparison of what several ranks hold a copy of, before they save it.

Each of these ranks writes a part of the copy (`tensors.cut`). Copies that differ, after a flipped
bit in a GPU's memory or a reduction that a rank missed, would become a checkpoint of no model,
whose hashes are right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.mesh.dist import World
from dtt.mesh.sharding import LaidOut, local

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of each number of bytes."""


@torch.no_grad()
def check(held: Mapping[str, LaidOut], step: int, world: World) -> None:
    """Raise DamagedError, on every rank, if ranks hold copies of a tensor that differ in a bit.

    `held` are the tensors of this rank. Each is read once, and ranks exchange a number for each set
    of ranks that hold the same. A collective.
    """
    if world.size == 1:
        return
    sums = _sums({n: h for n, h in sorted(held.items()) if h.layout.replica_count > 1})
    by_ranks: dict[int, list[int]] = defaultdict(list)
    for name, bits in sums.items():
        # Of integers, so that it is the same number in every process.
        by_ranks[hash(held[name].layout.replica_ranks(world.rank))].append(bits)
    digests = {ranks: hash(tuple(bits)) for ranks, bits in by_ranks.items()}
    found: dict[int, set[int]] = defaultdict(set)
    for of_rank in world.gather(digests):
        for ranks, digest in of_rank.items():
            found[ranks].add(digest)
    if any(len(of_set) > 1 for of_set in found.values()):
        # Only now every tensor by its name and place: thousands of numbers from each rank.
        raise _difference(
            world.gather(
                {(n, held[n].layout.box(world.rank).offset): bits for n, bits in sums.items()}
            ),
            step,
        )


def _sums(held: Mapping[str, LaidOut]) -> dict[str, int]:
    """Return the sum of the bits of this rank's part of each tensor, as integers."""
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, one in held.items():
        part = local(one.tensor.detach())
        bits = part.view(BITS[part.itemsize]).sum(dtype=torch.int64)
        by_device[part.device][name] = bits
    # One copy from each device: the host waits once.
    return {
        name: number
        for sums in by_device.values()
        for name, number in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    }


def _difference(of_ranks: list[dict[tuple[str, tuple[int, ...]], int]], step: int) -> DamagedError:
    """Return the error about the first tensor of which the ranks' sums differ."""
    for place in sorted({place for sums in of_ranks for place in sums}):
        sums = {rank: of_rank[place] for rank, of_rank in enumerate(of_ranks) if place in of_rank}
        counted = Counter(sums.values()).most_common()
        if len(counted) == 1:
            continue
        # The minority, if there is one: of two ranks nothing tells which one is right.
        others = [rank for rank, bits in sums.items() if bits != counted[0][0]]
        ranks = others if len(others) < counted[0][1] else [*sums]
        listed = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
        return DamagedError(
            f"the values of {place[0]} are not the same on all ranks that hold it",
            where=f"rank {listed}, after step {step}, which is not saved",
            why="since the last save, a rank has computed or received other numbers than the rest",
            next="resume from the last checkpoint, where they were the same; if it happens again, "
            "leave out the node of that rank, or try dtt verify with the configuration",
        )
    raise AssertionError("the sums of some set of ranks differ")
