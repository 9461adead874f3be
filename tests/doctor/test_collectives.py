"""Before training: every rank hears every other, right and fast, and who does not is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks

from dtt.base.errors import EnvironmentUnfit
from dtt.doctor import collectives
from dtt.doctor.collectives import Heard, Link, Pair, Timing, blamed
from dtt.mesh.dist import World

NODE = socket.gethostname()


def spoil(world: World, liar: int, *names: str) -> tuple[list[Timing], list[Link], list[str]]:
    """Exchange, while the collectives `names` begin with a wrong number on rank `liar`."""

    def spoilt(collective: Callable[..., object]) -> Callable[..., object]:
        def call(out: torch.Tensor, *given: Any) -> object:
            (given[0] if given else out)[0] += 1
            return collective(out, *given)

        return call

    torch.set_num_threads(1)
    collectives.SIZES["cpu"] = dict.fromkeys(collectives.SIZES["cpu"], 2)  # calls
    if world.rank == liar:
        for name in names:
            module = collectives if hasattr(collectives, name) else dist
            setattr(module, name, spoilt(getattr(module, name)))
    timings, links, problems = collectives.run(world)
    return timings, links, [str(problem) for problem in problems]


def test_three_healthy_ranks_report_no_problem() -> None:
    results = on_ranks(3, spoil, -1)
    timings, links, problems = results[0]
    assert problems == []
    assert results == [results[0]] * 3
    assert {(one.collective, one.dtype) for one in timings} == {
        (collective, dtype)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
        for dtype in ("float32", "bfloat16", "int64")
    }
    assert {one.bytes for one in timings if one.dtype == "bfloat16"} == {6, 2004, 1_000_002}
    assert all(0 < one.least <= one.p50 <= one.p99 for one in timings)
    sizes = (4, 2_000_000)
    assert {(one.ranks, one.bytes) for one in links} == {
        (pair, size) for pair in ((0, 1), (1, 2)) for size in sizes
    }
    assert {(one.kind, one.nodes) for one in links} == {("within a node", (NODE, NODE))}
    assert [one.seconds for one in links] == sorted((one.seconds for one in links), reverse=True)


def test_a_rank_that_sends_wrong_values_is_reported_with_its_node() -> None:
    results = on_ranks(3, spoil, 1, "all_gather_single")
    for _, _, problems in results:
        (problem,) = problems
        assert "rank 1: collectives return wrong values" in problem
        assert f"node {NODE}" in problem
        assert "all_gather of 1,002 bfloat16" in problem
        assert f"launch.exclude={NODE}" in problem


def test_a_wrong_sum_without_a_culprit_is_reported_too() -> None:
    for _, _, problems in on_ranks(3, spoil, 2, "all_reduce"):
        (problem,) = problems
        assert "sums are wrong on rank 0, 1, 2" in problem
        assert "all_reduce of 3 float32; all_reduce of 1,002 float32" in problem
        assert "reduce_scatter" not in problem


def leave(world: World, before: str, reported: Path) -> None:
    """The second rank ends before a call; `reported` is what the first one then says."""
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


@pytest.mark.parametrize(
    ("pairs", "ranks"),
    [
        ([], []),
        ([(1, 0), (1, 1)], [1]),  # it hears itself wrong, too
        ([(2, 3)], [2, 3]),
        ([(0, 1), (1, 3), (1, 5)], [1]),
        ([(0, 1), (1, 3), (1, 5), (4, 6), (6, 7)], [1, 6]),
    ],
)
def test_the_rank_that_explains_most_is_blamed(pairs: list[Pair], ranks: list[int]) -> None:
    assert blamed(pairs) == ranks


def swaps(nodes: str, seconds: Callable[[int, int], float]) -> list[Heard]:
    """What ranks, each on the node of its letter, hear in swaps that take `seconds`."""
    heard = [Heard(node) for node in nodes]
    ranks = range(len(nodes))
    for pair in combinations(ranks, 2):
        if pair[1] - pair[0] == 1 or (pair[0] ^ pair[1]).bit_count() == 1:
            for rank, partner in (pair, pair[::-1]):
                heard[rank].swaps[partner, 9] = seconds(*pair)
    return heard


def slow(reported: list[Heard]) -> list[str]:
    return [str(problem) for problem in collectives._slow(reported)]


def test_a_slow_rank_is_named_and_those_that_wait_for_it_are_not() -> None:
    (problem,) = slow(swaps("aaaabbbb", lambda r, p: 0.4 if 6 in (r, p) else 0.1))
    assert "rank 6 communicates slowly" in problem
    assert "node b" in problem
    # Rank 5 is compared with neighbours at the same place on a node.
    for other in ("4 on node b", "5 on node b", "7 on node b", "2 on node a"):
        assert f"4.0 times with rank {other}" in problem


def test_links_between_nodes_are_not_compared_with_links_within_a_node() -> None:
    node = "aaabbbcc"
    assert slow(swaps(node, lambda r, p: 0.1 if node[r] == node[p] else 0.9)) == []


def test_a_slow_link_is_reported_as_both_of_its_ends() -> None:
    first, second = slow(swaps("aaaabbbb", lambda r, p: 0.9 if {r, p} == {1, 5} else 0.1))
    assert "rank 1 communicates slowly" in first
    assert "rank 5 communicates slowly" in second


def test_a_slow_link_of_a_pipeline_is_compared_with_those_between_other_nodes() -> None:
    first, second = slow(swaps("aabbccdd", lambda r, p: 0.9 if {r, p} == {3, 4} else 0.1))
    assert "9.0 times with rank 4 on node c" in first
    assert "9.0 times with rank 3 on node b" in second


def test_neighbours_on_a_node_are_compared_by_their_place_on_it() -> None:
    joined = {(0, 1), (2, 3), (4, 5), (6, 7)}  # by NVLink
    assert slow(swaps("aaaabbbb", lambda *pair: 0.1 if pair in joined else 0.9)) == []


def test_the_slowest_neighbours_come_first() -> None:
    heard = swaps("aabb", lambda r, p: 0.1 + 0.1 * r)
    heard[0].swaps[1, 9] = 0.5  # it waited for the other one
    assert collectives._links(heard) == [
        Link((2, 3), ("b", "b"), 36, 0.1 + 0.1 * 2),
        Link((1, 2), ("a", "b"), 36, 0.2),
        Link((0, 1), ("a", "a"), 36, 0.1),
    ]
