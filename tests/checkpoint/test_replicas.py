"""Ranks that hold different values of one tensor do not save it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtt.base.errors import DamagedError
from dtt.checkpoint import replicas
from dtt.mesh.dist import World
from dtt.mesh.sharding import LaidOut, Placed, layout_of, local, on_every_rank, on_this_rank


def said(world: World, changed: str, at: int) -> str:
    """The error on this rank, if rank `at` has another bit in the tensor `changed`."""
    plain = {f"w{i}": torch.arange(6.0).to(dtype) for i, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.int64, torch.float64)
    )}  # fmt: skip
    held: dict[str, LaidOut] = dict(on_every_rank(plain))
    if world.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cut = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
        held["cut"] = Placed(cut, layout_of(cut, mesh))
    held |= on_this_rank({f"rng/{world.rank}": torch.tensor([float(world.rank)])})
    if world.rank == at:
        local(held[changed].tensor).view(-1)[1] += 1
    try:
        replicas.check(held, 7, world)
    except DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["w0", "w1", "w2", "w3"])
def test_the_error_on_every_rank_names_the_tensor_and_the_odd_rank(name: str) -> None:
    for error in on_ranks(3, said, name, 2):
        assert f"the values of {name} are not the same on all ranks" in error
        assert "rank 2, after step 7" in error


def test_of_two_ranks_both_are_named() -> None:
    for error in on_ranks(4, said, "cut", 1):
        assert "the values of cut are not the same" in error
        assert "rank 1, 3, after step 7" in error


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_replicas_and_what_one_rank_alone_holds_pass(ranks: int) -> None:
    assert on_ranks(ranks, said, "w0", ranks) == [""] * ranks


def exchanges(world: World) -> int:
    """The number of exchanges of a check."""
    with mock.patch.object(World, "gather", autospec=True, side_effect=World.gather) as gather:
        assert not said(world, "w0", world.size)
    return gather.call_count


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (2, 1)])
def test_a_check_is_one_exchange_and_none_of_a_rank_alone(ranks: int, expected: int) -> None:
    assert on_ranks(ranks, exchanges) == [expected] * ranks
