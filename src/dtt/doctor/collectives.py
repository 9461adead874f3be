"""Communication check: collectives with known results, for correctness and speed.

Every rank contributes values that all others know in advance, so a wrong value identifies the rank
that sent it. The check runs all collectives of training, at sizes that measure latency, a single
packet and bandwidth. Then the ranks swap data with their neighbours in a ring, as in a pipeline: a
rank or node is slow if both of its links are.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtt.base.errors import EnvironmentUnfit
from dtt.doctor.devices import SLOW, wait
from dtt.mesh.dist import World
from dtt.mesh.environment import without

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZES = {"cpu": {1: 50, 1_000: 50, 500_000: 20}, "cuda": {1: 50, 1_000: 50, 2**24: 20}}
"""Number of calls for each number of elements, by device. The count is that of the larger of input
and output, rounded up to a multiple of the number of ranks."""
SWAPS = {"cpu": {1: 50, 500_000: 20}, "cuda": {1: 50, 2**22: 20}}
"""The same for swaps: on a GPU the larger has 16 MiB, as the hidden states of a micro-batch may."""
WITHIN, BETWEEN = "within a node", "between nodes"
WARM_UP = 2
LARGEST = 16
"""Values are 1 to 16, and at most 16 ranks contribute to a sum, so bf16 holds every sum exactly."""

# torch 2.13 renamed these functions.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True)
class Timing:
    """Latency of a collective at one size and dtype, on the slowest rank.

    Times are in seconds as the host sees them, from the call to the result on the device.
    """

    collective: str
    dtype: str
    bytes: int
    """Size of the larger of a rank's input and output."""
    least: float
    p50: float
    p99: float
    """The maximum, as there are fewer than a hundred calls."""

    @property
    def gb_s(self) -> float:
        """Algorithm bandwidth as nccl-tests defines it, bytes / p50, in GB/s (10^9 bytes)."""
        return self.bytes / self.p50 / 1e9


@dataclass
class ReceivedTiming:
    """The results of one rank."""

    node: str = field(default_factory=socket.gethostname)
    timings: list[Timing] = field(default_factory=list)
    wrong: list[tuple[str, int | None]] = field(default_factory=list)
    """(collective, rank) for each rank whose values arrived wrong here; None: a sum over all."""
    swaps: dict[int, list[Timing]] = field(default_factory=dict)
    """Swaps with each neighbour, from the smallest size to the largest."""


class Collective(NamedTuple):
    """A collective with a known result."""

    name: str
    before: Tensor
    """Content of the output buffer before the call."""
    call: Callable[[Tensor], object]
    """Function that runs the collective on the output buffer."""
    expected: Tensor
    """Expected output [sources, elements]: a row is from one rank, or is the sum over all."""
    sources: Sequence[int | None]


def run(world: World) -> tuple[list[Timing], list[EnvironmentUnfit]]:
    """Run all collectives and swaps with all ranks; the result is the same on every rank.

    Returns the times of the slowest rank, and the problems. Raises EnvironmentUnfit immediately if
    a collective or a swap fails.
    """
    if world.control is None:
        return [], []
    received = ReceivedTiming()
    for dtype in DTYPES:
        for size, calls in SIZES[world.device.type].items():
            for one in _collectives(world, dtype, size):
                received.timings.append(_try(world, one, calls, received))
    nodes = world.gather(received.node)
    for partner in _neighbours(world.rank, world.size):
        received.swaps[partner] = [
            _try(world, _swap_with(world, partner, nodes[partner], size), calls, received)
            for size, calls in SWAPS[world.device.type].items()
        ]
    results = world.gather(received)
    return _slowest(results), [*_wrong(results), *_slow(results)]


def _collectives(world: World, dtype: torch.dtype, size: int) -> Iterator[Collective]:
    ranks = torch.arange(world.size, device=world.device)[:, None]
    each = math.ceil(size / world.size)
    positions = torch.arange(each * world.size, device=world.device)
    piece = slice(world.rank * each, (world.rank + 1) * each)
    mine = _ramp(world.rank, positions).to(dtype)
    zeros = torch.zeros_like(mine)

    # In a sum not every rank contributes at every position: no more than bf16 can add exactly.
    stride = math.ceil(world.size / LARGEST)
    period = positions[: math.lcm(LARGEST, stride)]
    summand = _ramp(world.rank, positions, stride).to(dtype)
    sums = _ramp(ranks, period, stride).sum(0).to(dtype)
    sums = sums.repeat(math.ceil(len(positions) / len(period)))[: len(positions)]

    everyone = range(world.size)
    each_piece = _ramp(ranks, positions[:each]).to(dtype)
    to_me = _ramp(ranks, positions[piece]).to(dtype)
    from_first = _ramp(0, positions).to(dtype)[None]
    yield Collective("all_reduce", summand, dist.all_reduce, sums[None], [None])
    yield Collective(
        "reduce_scatter", zeros[:each], lambda out: reduce_scatter_single(out, summand),
        sums[None, piece], [None],
    )  # fmt: skip
    yield Collective(
        "all_gather", zeros, lambda out: all_gather_single(out, mine[:each]), each_piece, everyone
    )
    yield Collective(
        "all_to_all", zeros, lambda out: dist.all_to_all_single(out, mine), to_me, everyone
    )
    before = mine if world.first else zeros
    yield Collective("broadcast", before, lambda out: dist.broadcast(out, src=0), from_first, [0])


def _neighbours(rank: int, size: int) -> list[int]:
    """Return the neighbours of a rank in the ring, in the order of its swaps.

    All ranks swap in pairs (0, 1), (2, 3), …, then (1, 2), (3, 4), …, and at last 0 with the last
    rank. So no rank waits for a chain of others, which would make a slow one look like many.
    """
    pairs = [rank ^ 1, ((rank + 1) ^ 1) - 1]
    found = [partner for partner in pairs if 0 <= partner < size]
    if size > 2 and rank in (0, size - 1):
        found.append(size - 1 - rank)
    return found


def _swap_with(world: World, partner: int, node: str, size: int) -> Collective:
    positions = torch.arange(size, device=world.device)
    mine = _ramp(world.rank, positions).float()

    def swap(theirs: Tensor) -> None:
        # Both in one batch, as a pipeline does it: with NCCL, two sends would wait for each other.
        both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    name, expected = f"swap with rank {partner}, node {node},", _ramp(partner, positions).float()
    return Collective(name, torch.zeros_like(mine), swap, expected[None], [partner])


def _ramp(rank: Tensor | int, positions: Tensor, stride: int = 1) -> Tensor:
    """Return a rank's value at each position: 1 to 16, repeated; 0 except at every `stride`-th."""
    place = positions + rank
    return (place % LARGEST + 1) * (place % stride == 0)


def _try(world: World, one: Collective, calls: int, received: ReceivedTiming) -> Timing:
    """Time a collective, and check every result."""
    out = torch.empty_like(one.before)
    rows = out.view(len(one.sources), -1)
    wrong = torch.zeros(len(one.sources), dtype=torch.bool, device=world.device)
    dtype = str(out.dtype).removeprefix("torch.")
    largest = one.expected.numel() * (world.size if one.name == "reduce_scatter" else 1)
    what = f"{one.name} of {largest:,} {dtype}"
    seconds = []
    try:
        for _ in range(WARM_UP + calls):
            out.copy_(one.before)
            wait(world.device)
            started = time.perf_counter()
            one.call(out)
            wait(world.device)
            seconds.append(time.perf_counter() - started)
            wrong |= (rows != one.expected).any(1)
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"{what} failed on rank {world.rank}, node {received.node}",
            why=str(error).splitlines()[0],
            next="every rank that waited reports this; check the node of a rank that does not",
        ) from None
    ordered = sorted(seconds[WARM_UP:])
    p50, p99 = (ordered[math.ceil(share * calls) - 1] for share in (0.50, 0.99))
    faults = zip(one.sources, wrong.tolist(), strict=True)
    received.wrong += [(what, source) for source, is_wrong in faults if is_wrong]
    return Timing(one.name, dtype, largest * out.element_size(), ordered[0], p50, p99)


# ---- evaluation ----------------------------------------------------------------------------------


def _slowest(results: Sequence[ReceivedTiming]) -> list[Timing]:
    """Return the times of each collective on the rank where it was slowest, then of the swaps."""
    named = [(one.collective, one) for received in results for one in received.timings]
    for rank, received in enumerate(results):
        for partner, swaps in received.swaps.items():
            named += [(f"swap {_kind(results, rank, partner)}", one) for one in swaps]
    calls = defaultdict[tuple[str, str, int], list[Timing]](list)
    for name, one in named:
        calls[name, one.dtype, one.bytes].append(one)
    slowest = []
    for call, ours in calls.items():
        least, p50, p99 = map(max, zip(*((t.least, t.p50, t.p99) for t in ours), strict=True))
        slowest.append(Timing(*call, least, p50, p99))
    return slowest


def _wrong(results: Sequence[ReceivedTiming]) -> Iterator[EnvironmentUnfit]:
    """Yield a problem for each rank that most wrong values came from or arrived at.

    That is both ranks of a link if a single one is wrong. Without a rank, sums may be wrong.
    """
    faults = [(what, (a, b)) for b, received in enumerate(results) for what, a in received.wrong]
    links = {frozenset((a, b)) for _, (a, b) in faults if a is not None}
    wrong_links = Counter(rank for link in links for rank in link)
    most = max(wrong_links.values(), default=0)
    culprits = sorted(rank for rank, number in wrong_links.items() if number == most)
    for rank in culprits:
        # Without its wrong sums: those say nothing about where they come from.
        own = (what for what, pair in faults if rank in pair and None not in pair)
        yield EnvironmentUnfit(
            f"rank {rank}: collectives return wrong values",
            where=f"node {results[rank].node}",
            why="; ".join(dict.fromkeys(own)),
            next=without(results[rank].node),
        )
    if faults and not culprits:
        ranks = list(dict.fromkeys(rank for _, (_, rank) in faults))
        yield EnvironmentUnfit(
            f"sums are wrong on rank {', '.join(map(str, ranks))}",
            where=f"node {', '.join(dict.fromkeys(results[rank].node for rank in ranks))}",
            why="; ".join(dict.fromkeys(what for what, _ in faults)),
            next="collectives without a sum are correct: try half of the nodes, then half of those",
        )


def _slow(results: Sequence[ReceivedTiming]) -> Iterator[EnvironmentUnfit]:
    """Yield a problem for each rank whose links are all slow, and for each such node.

    A link is compared with others of its kind. A neighbour of a slow rank has a second link that is
    not slow, so it is not named. A node is judged by its links to other nodes alone, so its own
    network is found even if each of its ranks has a fast neighbour beside it.
    """
    links = []
    kinds = defaultdict[str, list[float]](list)
    for rank, received in enumerate(results):
        for partner, swaps in received.swaps.items():
            # The larger size: a latency depends on the load of the cores more than on the link. The
            # faster of the two ends: the other one may have waited for its start.
            seconds = min(swaps[-1].least, results[partner].swaps[rank][-1].least)
            kind = _kind(results, rank, partner)
            kinds[kind].append(seconds)
            links.append((rank, kind, seconds))
    ratios = defaultdict[tuple[str, str], list[float]](list)
    for rank, kind, seconds in links:
        node, ratio = results[rank].node, seconds / median_low(kinds[kind])
        ratios[f"rank {rank}", node].append(ratio)
        if kind == BETWEEN:
            ratios[f"node {node}", node].append(ratio)
    slow = {key: min(found) for key, found in ratios.items() if min(found) > SLOW}
    by_rank = {node for owner, node in slow if owner.startswith("rank")}
    for (owner, node), ratio in slow.items():
        if owner.startswith("node") and node in by_rank:
            continue  # its rank says more
        yield EnvironmentUnfit(
            f"{owner} communicates slowly",
            where=f"node {node}",
            why=f"its swaps with neighbours take at least {ratio:.1f} times as long as others",
            next=without(node),
        )


def _kind(results: Sequence[ReceivedTiming], rank: int, partner: int) -> str:
    """Return the part of the network between two ranks."""
    return WITHIN if results[rank].node == results[partner].node else BETWEEN
