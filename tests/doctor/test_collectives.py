"""Before training: every rank hears every other, right and fast, and who does not is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks

from dtt.base.errors import EnvironmentUnfit
from dtt.doctor import collectives
from dtt.doctor.collectives import ReceivedTiming, Timing
from dtt.mesh.dist import World

NODE = socket.gethostname()


def few_calls(largest: int) -> None:
    """Exchange up to so many numbers, and these only a few times."""
    torch.set_num_threads(1)
    for sizes in (collectives.SIZES, collectives.SWAPS):
        sizes["cpu"] = {size: 2 for size in sizes["cpu"] if size <= largest}


def spoil(world: World, liar: int, *names: str) -> tuple[list[Timing], list[str]]:
    """Exchange, while the collectives `names` begin with a wrong number on rank `liar`."""

    def spoilt(collective: Callable[..., object]) -> Callable[..., object]:
        def call(out: torch.Tensor, *given: Any) -> object:
            (given[0] if given else out)[0] += 1
            return collective(out, *given)

        return call

    few_calls(500_000 if not names else 1_000)
    if world.rank == liar:
        for name in names:
            module = collectives if hasattr(collectives, name) else dist
            setattr(module, name, spoilt(getattr(module, name)))
    timings, problems = collectives.run(world)
    return timings, [str(problem) for problem in problems]


def test_three_healthy_ranks_report_no_problem() -> None:
    results = on_ranks(3, spoil, -1)
    timings, problems = results[0]
    assert problems == []
    assert results == [results[0]] * 3
    assert {(one.collective, one.dtype) for one in timings} == {
        (collective, dtype)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
        for dtype in ("float32", "bfloat16", "int64")
    } | {("swap within a node", "float32")}
    assert {one.bytes for one in timings if one.dtype == "bfloat16"} == {6, 2004, 1_000_002}
    assert all(0 < one.least <= one.p50 <= one.p99 for one in timings)
    swaps = [one.bytes for one in timings if one.collective == "swap within a node"]
    assert swaps == [4, 2_000_000]


def test_a_rank_that_sends_wrong_values_is_reported_with_its_node() -> None:
    results = on_ranks(3, spoil, 1, "all_gather_single")
    for _, problems in results:
        (problem,) = problems
        assert "rank 1: collectives return wrong values" in problem
        assert f"node {NODE}" in problem
        assert "all_gather of 1,002 bfloat16" in problem
        assert f"launch.exclude={NODE}" in problem


def test_a_wrong_sum_without_a_culprit_is_reported_too() -> None:
    for _, problems in on_ranks(3, spoil, 2, "all_reduce"):
        (problem,) = problems
        assert "sums are wrong on rank 0, 1, 2" in problem
        assert "all_reduce of 3 float32; all_reduce of 1,002 float32" in problem
        assert "reduce_scatter" not in problem


def leave(world: World, before: str, reported: Path) -> None:
    """The second rank ends before a call; `reported` is what the first one then says."""
    few_calls(1_000)
    if not world.first:
        setattr(dist, before, lambda *_: os._exit(0))
    with pytest.raises(EnvironmentUnfit) as caught:
        collectives.run(world)
    reported.write_text(str(caught.value))


@pytest.mark.parametrize(
    ("before", "what"),
    [
        ("all_reduce", "all_reduce of 2 float32"),
        ("batch_isend_irecv", f"swap with rank 1, node {NODE}, of 1 float32"),
    ],
)
def test_a_rank_that_waits_in_vain_reports_what_for_and_its_node(
    before: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(EOFError):  # the second rank has left without a word
        on_ranks(2, leave, before, tmp_path / "told")
    said = (tmp_path / "told").read_text()
    assert f"{what} failed on rank 0, node {NODE}" in said
    assert "why:   " in said


@pytest.mark.parametrize("size", [1, 2, 16, 17, 100, 2048])
def test_bf16_sums_are_exact_in_any_order(size: int) -> None:
    stride = -(-size // collectives.LARGEST)
    ranks, positions = torch.arange(size)[:, None], torch.arange(16 * stride)
    numbers = collectives._ramp(ranks, positions, stride)
    assert numbers.min() >= 0  # so no partial sum is larger than the whole
    assert numbers.sum(0).max() <= 256  # the first integer that bf16 cannot hold is 257
    assert (numbers.sum(1) > 0).all()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_swaps_of_a_ring_reach_every_neighbour_and_never_wait_in_a_circle(size: int) -> None:
    left = {rank: collectives._neighbours(rank, size) for rank in range(size)}
    ring = {frozenset((rank, (rank + 1) % size)) for rank in range(size)}
    assert {frozenset((rank, other)) for rank in left for other in left[rank]} == ring
    while any(left.values()):
        ready = [r for r, others in left.items() if others and left[others[0]][:1] == [r]]
        assert ready
        for rank in ready:
            left[rank].pop(0)


@pytest.mark.parametrize(
    ("pairs", "ranks"),
    [
        ([], []),
        ([(1, 0), (1, 1)], [1]),  # it receives wrong values from itself, too
        ([(2, 3)], [2, 3]),
        ([(0, 1), (1, 3), (1, 5)], [1]),
        ([(rank, other) for rank in (1, 6) for other in range(8)], [1, 6]),
    ],
)
def test_the_rank_of_most_wrong_values_is_named(
    pairs: list[tuple[int, int]], ranks: list[int]
) -> None:
    results = [ReceivedTiming("n") for _ in range(8)]
    for source, receiver in pairs:
        results[receiver].wrong += [("broadcast", source), ("a sum", None)]
    problems = [str(problem) for problem in collectives._wrong(results)]
    assert [one.partition(":")[0] for one in problems] == [f"rank {rank}" for rank in ranks]
    # A wrong sum does not tell where it comes from.
    assert not any("a sum" in one for one in problems)


@pytest.mark.parametrize(
    ("nodes", "slow_links", "named"),
    [
        ("aaaabbbb", {(5, 6), (6, 7)}, [("rank 6", "b")]),  # and not those that wait for it
        ("aaaabbbb", {(0, 1), (0, 7)}, [("rank 0", "a")]),
        ("abcd", {(1, 2), (2, 3)}, [("rank 2", "c")]),  # once, not as a node, too
        ("aabbccdd", {(1, 2), (3, 4)}, [("node b", "b")]),  # its network, not that of a rank
        ("aaabbbcc", {(2, 3), (5, 6), (0, 7)}, []),  # all between nodes, which is another kind
        ("aaaabbbb", {(1, 2), (5, 6)}, []),  # NVLink joins the others in pairs
        ("ab", {(0, 1)}, []),
    ],
)
def test_a_slow_rank_or_node_is_named(
    nodes: str, slow_links: set[tuple[int, int]], named: list[tuple[str, str]]
) -> None:
    results = [ReceivedTiming(node) for node in nodes]
    for rank, received in enumerate(results):
        for partner in collectives._neighbours(rank, len(nodes)):
            slow = (min(rank, partner), max(rank, partner)) in slow_links
            seconds = 0.4 if slow else 0.1
            # One end also waits for the other one to start.
            timing = Timing("swap", "float32", 4, seconds + (rank < partner), 1.0, 1.0)
            received.swaps[partner] = [timing]
    problems = list(map(str, collectives._slow(results)))
    assert len(problems) == len(named)
    for problem, (owner, node) in zip(problems, named, strict=True):
        assert f"{owner} communicates slowly" in problem
        assert f"node {node}" in problem
        assert "at least 4.0 times as long" in problem
        assert f"launch.exclude={node}" in problem
