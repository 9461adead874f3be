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
from dtt.doctor.collectives import Heard, Pair, Timing, blamed
from dtt.mesh.dist import World

NODE = socket.gethostname()


def spoil(world: World, liar: int, *names: str) -> tuple[list[Timing], list[str]]:
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
    }
    assert {one.bytes for one in timings if one.dtype == "bfloat16"} == {6, 2004, 1_000_002}
    assert all(0 < one.p50 <= one.p99 for one in timings)


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


def leave(world: World, reported: Path) -> None:
    """The second rank ends; `reported` is what the first one then says."""
    if not world.first:
        os._exit(0)
    with pytest.raises(EnvironmentUnfit) as caught:
        collectives.run(world)
    reported.write_text(str(caught.value))


def test_a_rank_that_waits_in_vain_reports_the_collective_and_node(tmp_path: Path) -> None:
    with pytest.raises(EOFError):  # the second rank has left without a word
        on_ranks(2, leave, tmp_path / "told")
    said = (tmp_path / "told").read_text()
    assert f"all_reduce of 2 float32 failed on rank 0, node {NODE}" in said
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
    return [
        Heard(node, swaps={r ^ bit: seconds(r, r ^ bit) for bit in (1, 2, 4)})
        for r, node in enumerate(nodes)
    ]


def slow(reported: list[Heard]) -> list[str]:
    return [str(problem) for problem in collectives._slow(reported)]


def test_a_slow_rank_is_named_and_those_that_wait_for_it_are_not() -> None:
    (problem,) = slow(swaps("aaaabbbb", lambda r, p: 0.4 if 6 in (r, p) else 0.1))
    assert "rank 6 communicates slowly" in problem
    assert "node b" in problem
    assert "4.0 times with rank 7, 4.0 times with rank 4, 4.0 times with rank 2" in problem


def test_links_between_nodes_are_not_compared_with_links_within_a_node() -> None:
    node = "aaabbbcc"
    assert slow(swaps(node, lambda r, p: 0.1 if node[r] == node[p] else 0.9)) == []


def test_a_slow_link_is_reported_as_both_of_its_ends() -> None:
    first, second = slow(swaps("aaaabbbb", lambda r, p: 0.9 if {r, p} == {1, 5} else 0.1))
    assert "rank 1 communicates slowly" in first
    assert "rank 5 communicates slowly" in second
