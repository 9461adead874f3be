"""Communication check: collectives with known results, for correctness and speed.

Every rank contributes values that all others know in advance, so a wrong value identifies the rank
that sent it. The check runs all collectives of training, at sizes that measure latency, a single
packet and bandwidth. Then every rank swaps data with its neighbours, as in a pipeline, and with
log2(ranks) others, which reveals a slow one.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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

Pair = tuple[int, int]
"""Two ranks; the same rank twice if it received wrong values from itself."""


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


@dataclass(frozen=True)
class Link:
    """A swap of two neighbouring ranks, each of which sends and receives."""

    ranks: Pair
    nodes: tuple[str, str]
    bytes: int
    """Size of what each sends."""
    seconds: float
    """Time of the fastest swap, on the faster rank: the other one may have waited for its start."""

    @property
    def kind(self) -> str:
        """The part of the network."""
        return "within a node" if self.nodes[0] == self.nodes[1] else "between nodes"

    @property
    def gb_s(self) -> float:
        """Bandwidth in each direction, in GB/s (10^9 bytes)."""
        return self.bytes / self.seconds / 1e9


@dataclass
class Heard:
    """The results of one rank."""

    node: str = field(default_factory=socket.gethostname)
    timings: list[Timing] = field(default_factory=list)
    wrong: list[tuple[str, int]] = field(default_factory=list)
    """(collective, rank) for each rank whose values arrived wrong here."""
    wrong_sums: list[str] = field(default_factory=list)
    swaps: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of the fastest swap of each (partner, number of elements)."""


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


def run(world: World) -> tuple[list[Timing], list[Link], list[EnvironmentUnfit]]:
    """Run all collectives and swaps with all ranks; the result is the same on every rank.

    Returns the times of collectives, those of neighbours from the slowest to the fastest, and the
    problems. Raises EnvironmentUnfit immediately if a collective or a swap fails.
    """
    if world.control is None:
        return [], [], []
    heard = Heard()
    for dtype in DTYPES:
        for size, calls in SIZES[world.device.type].items():
            for one in _collectives(world, dtype, size):
                heard.timings.append(_try(world, one, calls, heard))
    nodes = world.gather(heard.node)
    for size, calls in SWAPS[world.device.type].items():
        for partner, one in _swaps(world, nodes, size):
            heard.swaps[partner, size] = _try(world, one, calls, heard).least
    results = world.gather(heard)
    return _slowest(results), _links(results), [*_wrong(results), *_slow(results)]


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

    yield Collective("all_reduce", summand, dist.all_reduce, sums[None], [None])
    yield Collective(
        "reduce_scatter",
        zeros[:each],
        lambda out: reduce_scatter_single(out, summand),
        sums[None, piece],
        [None],
    )
    yield Collective(
        "all_gather",
        zeros,
        lambda out: all_gather_single(out, mine[:each]),
        _ramp(ranks, positions[:each]).to(dtype),
        range(world.size),
    )
    yield Collective(
        "all_to_all",
        zeros,
        lambda out: dist.all_to_all_single(out, mine),
        _ramp(ranks, positions[piece]).to(dtype),
        range(world.size),
    )
    yield Collective(
        "broadcast",
        mine if world.first else zeros,
        lambda out: dist.broadcast(out, src=0),
        _ramp(0, positions).to(dtype)[None],
        [0],
    )


def _swaps(world: World, nodes: Sequence[str], size: int) -> Iterator[tuple[int, Collective]]:
    """Yield each partner of this rank and the swap with it, in the same order on all ranks.

    Partners are the neighbours, and the ranks whose number differs in one bit. At any time each
    rank has one partner, so that none waits for a chain of others.
    """
    positions = torch.arange(size, device=world.device)
    mine = _ramp(world.rank, positions).float()
    bits = [world.rank ^ (1 << bit) for bit in range((world.size - 1).bit_length())]
    for partner in (bits[0], ((world.rank + 1) ^ 1) - 1, *bits[1:]):
        if 0 <= partner < world.size:
            swap = Collective(
                f"swap with rank {partner}, node {nodes[partner]},",
                torch.zeros_like(mine),
                partial(_swap, mine, partner),
                _ramp(partner, positions).float()[None],
                [partner],
            )
            yield partner, swap


def _swap(mine: Tensor, partner: int, theirs: Tensor) -> None:
    # Both in one batch, as a pipeline does it: with NCCL, two sends would wait for each other.
    both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _ramp(rank: Tensor | int, positions: Tensor, stride: int = 1) -> Tensor:
    """Return a rank's value at each position: 1 to 16, repeated; 0 except at every `stride`-th."""
    place = positions + rank
    return (place % LARGEST + 1) * (place % stride == 0)


def _try(world: World, one: Collective, calls: int, heard: Heard) -> Timing:
    """Time a collective, and check every result."""
    out = torch.empty_like(one.before)
    rows = out.view(len(one.sources), -1)
    wrong = torch.zeros(len(one.sources), dtype=torch.bool, device=world.device)
    dtype = str(out.dtype).removeprefix("torch.")
    largest = one.expected.numel() * (world.size if one.name == "reduce_scatter" else 1)
    what = f"{one.name} of {largest:,} {dtype}"
    seconds = []
    with _answered(what, world.rank, heard.node):
        for _ in range(WARM_UP + calls):
            out.copy_(one.before)
            wait(world.device)
            started = time.perf_counter()
            one.call(out)
            wait(world.device)
            seconds.append(time.perf_counter() - started)
            wrong |= (rows != one.expected).any(1)
    ordered = sorted(seconds[WARM_UP:])
    p50, p99 = (ordered[math.ceil(share * calls) - 1] for share in (0.50, 0.99))
    for source, is_wrong in zip(one.sources, wrong.tolist(), strict=True):
        if is_wrong and source is None:
            heard.wrong_sums.append(what)
        elif is_wrong and source is not None:
            heard.wrong.append((what, source))
    return Timing(one.name, dtype, largest * out.element_size(), ordered[0], p50, p99)


@contextmanager
def _answered(what: str, rank: int, node: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"{what} failed on rank {rank}, node {node}",
            why=str(error).splitlines()[0],
            next="every rank that waited reports this; check the node of a rank that does not",
        ) from None


# ---- evaluation ----------------------------------------------------------------------------------


def _slowest(results: Sequence[Heard]) -> list[Timing]:
    """Return each collective's times on the rank where it was slowest."""
    return [
        Timing(
            ours[0].collective,
            ours[0].dtype,
            ours[0].bytes,
            max(one.least for one in ours),
            max(one.p50 for one in ours),
            max(one.p99 for one in ours),
        )
        for ours in zip(*(heard.timings for heard in results), strict=True)
    ]


def _links(results: Sequence[Heard]) -> list[Link]:
    """Return the swaps of neighbours, from the slowest to the fastest."""
    links = [
        Link(
            (rank, rank + 1),
            (heard.node, results[rank + 1].node),
            size * torch.float32.itemsize,
            min(seconds, results[rank + 1].swaps[rank, size]),
        )
        for rank, heard in enumerate(results)
        for (partner, size), seconds in heard.swaps.items()
        if partner == rank + 1
    ]
    return sorted(links, key=lambda link: -link.seconds)


def _wrong(results: Sequence[Heard]) -> Iterator[EnvironmentUnfit]:
    faults = [(what, (a, b)) for b, heard in enumerate(results) for what, a in heard.wrong]
    culprits = blamed(pair for _, pair in faults)
    for rank in culprits:
        yield EnvironmentUnfit(
            f"rank {rank}: collectives return wrong values",
            where=f"node {results[rank].node}",
            why="; ".join(dict.fromkeys(what for what, pair in faults if rank in pair)),
            next=without(results[rank].node),
        )
    sums = {rank: heard.wrong_sums for rank, heard in enumerate(results) if heard.wrong_sums}
    if sums and not culprits:
        yield EnvironmentUnfit(
            f"sums are wrong on rank {', '.join(map(str, sums))}",
            where=f"node {', '.join(dict.fromkeys(results[rank].node for rank in sums))}",
            why="; ".join(dict.fromkeys(what for wrong in sums.values() for what in wrong)),
            next="collectives without a sum are correct: try half of the nodes, then half of those",
        )


def _slow(results: Sequence[Heard]) -> Iterator[EnvironmentUnfit]:
    """Yield a problem for each rank with slow swaps.

    A swap is compared with others of the same distance, and of the same kind: within a node or
    between nodes.
    """
    kinds: dict[tuple[int, bool], dict[Pair, float]] = {}
    for rank, heard in enumerate(results):
        for (partner, size), seconds in heard.swaps.items():
            if size == 1:
                continue  # a latency depends on the load of the cores more than on the link
            together = heard.node == results[partner].node
            # Neighbours on a node are compared by their place on it. NVLink may join the GPUs in
            # pairs: 1 and 2 then have PCIe between them, as 5 and 6 have, but not 0 and 1.
            kind = (rank ^ partner if together else abs(rank - partner), together)
            pairs = kinds.setdefault(kind, {})
            pair = (min(rank, partner), max(rank, partner))
            pairs[pair] = min(seconds, pairs.get(pair, seconds))
    typical = {kind: median_low(pairs.values()) for kind, pairs in kinds.items()}
    late = {
        pair: seconds / typical[kind]
        for kind, pairs in kinds.items()
        for pair, seconds in pairs.items()
        if seconds > SLOW * typical[kind]
    }
    for rank in blamed(late):
        times = ", ".join(
            f"{ratio:.1f} times with rank {other} on node {results[other].node}"
            for pair, ratio in late.items()
            if rank in pair
            for other in [sum(pair) - rank]
        )
        yield EnvironmentUnfit(
            f"rank {rank} communicates slowly",
            where=f"node {results[rank].node}",
            why=f"a swap with it takes {times} as long as between other ranks",
            next=without(results[rank].node),
        )


def blamed(pairs: Iterable[Pair]) -> list[int]:
    """Return a small set of ranks that explains all pairs; both of a pair if it may be either.

    The choice is greedy, and so approximately the smallest set.
    """
    left, named = list(pairs), set[int]()
    while left:
        counts = Counter(rank for pair in left for rank in set(pair))
        most = max(counts.values())
        named |= {rank for rank, count in counts.items() if count == most}
        left = [pair for pair in left if named.isdisjoint(pair)]
    return sorted(named)
