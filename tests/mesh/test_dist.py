"""Ranks agree, add up, share and wait; alone all of it is nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_classes import NOTHING
from support.ranks import on_ranks
from support.running import Dtt

from dtt.base.errors import EnvironmentUnfit
from dtt.base.ranks import Ranks
from dtt.mesh.dist import SHARED_GPU, World, _share_gpu, choose_device, start


def talk(world: World) -> dict[str, Any]:
    return {
        "rank": (world.rank, world.size, world.first),
        "maximum": world.maximum(world.rank * 7 - 3),
        "shared": world.from_first({"from": world.rank, "path": Path("x")}),
    }


def test_two_ranks_agree_and_share() -> None:
    first, second = on_ranks(2, talk)
    assert first.pop("rank") == (0, 2, True)
    assert second.pop("rank") == (1, 2, False)
    expected = {"maximum": 4, "shared": {"from": 0, "path": Path("x")}}
    assert first == second == expected


def largest(world: World) -> list[list[int]]:
    """What this rank gets if each rank in turn has the largest of three values."""
    owners = range(world.size)
    return [world.maxima(-world.rank, 7 * (world.rank == owner), owner) for owner in owners]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_maximum_is_that_of_every_rank(ranks: int) -> None:
    assert on_ranks(ranks, largest) == [[[0, 7, owner] for owner in range(ranks)]] * ranks


def meet(world: World, folder: Path) -> list[str]:
    """What this rank sees after the barrier; the second rank is late."""
    if not world.first:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            pass
    (folder / f"rank-{world.rank}").touch()
    world.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_no_rank_passes_the_barrier_before_all_are_there(tmp_path: Path) -> None:
    assert on_ranks(2, meet, tmp_path) == [["rank-0", "rank-1"]] * 2


def test_a_single_rank_communicates_with_itself() -> None:
    world = start(Ranks(), "cpu")
    assert (world.rank, world.size, world.first, world.control) == (0, 1, True, None)
    assert world.maximum(5) == 5
    value = torch.ones(2)
    assert world.from_first(value) is value
    world.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_environment_error() -> None:
    with pytest.raises(EnvironmentUnfit, match=r"no GPU[\s\S]*train\.device=cpu"):
        start(Ranks(), "cuda")


def test_auto_takes_a_gpu_if_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert start(Ranks(), "auto").device.type == expected


@pytest.mark.parametrize("launcher", ["openmpi", "pmi", "slurm"])
def test_another_launcher_than_torchrun_is_refused_with_the_right_command(launcher: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"torchrun --standalone --nproc_per_node 4"):
        start(Ranks(0, 4, 0, 4, launcher), "cpu")  # type: ignore[arg-type]


SHUTDOWN_HANGS = """
import os, time, pathlib
import torch.distributed as dist
real = dist.destroy_process_group
def destroy():
    pathlib.Path("destroyed-" + os.environ["RANK"]).touch()
    if "fail" in os.environ:
        time.sleep(600)  # as NCCL, which waits for collectives that the other ranks never join
    real()
dist.destroy_process_group = destroy
from dtt.train.trainer import Trainer
step = Trainer.step
def fail(self, *arguments):
    if "fail" in os.environ and os.environ["RANK"] == "1" and self.position.step == 1:
        raise AssertionError("made to fail")
    step(self, *arguments)
Trainer.step = fail
"""


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"fail": "1"}, {}], ids=["failure", "success"])
def test_only_a_run_that_ends_well_waits_for_the_process_group(
    dtt: Dtt, tiny: Any, env: dict[str, str]
) -> None:
    (dtt.folder / "mine.py").write_text(SHUTDOWN_HANGS + NOTHING)
    keys = tiny(train__steps=2, actions="[{type: mine.py:Nothing}]")
    process = dtt.start_torchrun(2, "-m", "dtt.main", "train", *keys, **env)
    try:
        run = dtt.wait(process)
    finally:
        process.kill()
    assert ("AssertionError: made to fail" in run.stderr) == bool(env), run.stderr
    assert (run.returncode != 0) == bool(env)
    destroyed = sorted(path.name for path in dtt.folder.glob("destroyed-*"))
    assert destroyed == ([] if env else ["destroyed-0", "destroyed-1"])


def test_ranks_of_one_machine_share_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes each for another machine, and none can take the memory of the others."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr("os.environ", {"NCCL_HOSTID": "of-the-node"})
    ranks = Ranks(3, 8, 3, 8, "torchrun")
    assert choose_device(ranks, SHARED_GPU) == torch.device("cuda", 0)
    _share_gpu(ranks)
    assert os.environ["NCCL_HOSTID"] == "rank-3"
    assert os.environ["NCCL_P2P_DISABLE"] == os.environ["NCCL_SHM_DISABLE"] == "1"
    assert fractions == [0.9 / 8]
    with pytest.raises(EnvironmentUnfit, match="is for processes of one machine"):
        _share_gpu(Ranks(3, 16, 3, 8, "torchrun"))
