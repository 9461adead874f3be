"""`python -m dtt.runtime.preflight`: whether all processes hear each other, before training starts.

Run by the launcher of the training itself. Every rank contributes numbers that all others know in
advance, so a wrong answer names the rank it came from.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from dtt.errors import EnvironmentUnfit
from dtt.runtime.dist import World, lost_peers_told, start, stop
from dtt.runtime.log import log
from dtt.runtime.process import command
from dtt.runtime.ranks import Ranks

SIZES = (1, 1_000, 1_000_000)
"""Numbers in one exchange: a latency, a packet, a bandwidth."""


def number(rank: int) -> int:
    """What a rank contributes; sums of up to 2,000 ranks are exact in fp32."""
    return rank + 1


def check(world: World, number: Callable[[int], int] = number) -> list[str]:
    """Exchange known numbers; returns what was wrong anywhere, the same list on every rank."""
    if world.control is None:
        return []
    mine = [problem for size in SIZES for problem in _exchanges(world, size, number(world.rank))]
    told: list[list[str]] = [[] for _ in range(world.size)]
    dist.all_gather_object(told, mine, group=world.control)
    return sorted({problem for problems in told for problem in problems})


def _exchanges(world: World, size: int, mine: int) -> Iterator[str]:
    own = torch.full((size,), float(mine), device=world.device)
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own)
    for rank, got in enumerate(gathered):
        if not _all_are(got, number(rank)):
            yield f"all_gather of {size}: rank {rank} gave a wrong answer"
    total = own.clone()
    dist.all_reduce(total)
    if not _all_are(total, sum(map(number, range(world.size)))):
        yield f"all_reduce of {size}: the sum is wrong"
    for rank in {0, world.size - 1}:
        box = own.clone()
        dist.broadcast(box, src=rank)
        if not _all_are(box, number(rank)):
            yield f"broadcast of {size}: rank {rank} gave a wrong answer"


def _all_are(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all().item())


def main(device: str) -> None:
    """Check, and tell where each rank is when something is wrong; EnvironmentUnfit then."""
    try:
        with lost_peers_told():
            world = start(Ranks.detect(), device)
            problems = check(world)
            nodes: list[str | None] = [None] * world.size
            if world.control is not None:
                dist.all_gather_object(nodes, socket.gethostname(), group=world.control)
    finally:
        stop()
    if problems:
        places = ", ".join(f"rank {rank} on {node}" for rank, node in enumerate(nodes))
        raise EnvironmentUnfit(
            "the processes do not exchange numbers right",
            where=places,
            why="; ".join(problems),
            next="leave that node out: launch.exclude=NODE",
        )
    log.info("preflight: %d x %s, all exchanges are right", world.size, world.device.type)


if __name__ == "__main__":
    with command():
        main("cpu" if "--cpu" in sys.argv[1:] else "auto")
