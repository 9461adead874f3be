"""Before training: every rank hears every other, and who gives a wrong answer is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from ranks import on_ranks

from dtt.runtime import preflight
from dtt.runtime.dist import World


def exchange(world: World, liar: int | None) -> list[str]:
    """What rank `liar` breaks by giving other numbers than the others expect of it."""
    lie = 7 if world.rank == liar else 0
    return preflight.check(world, lambda rank: preflight.number(rank) + lie * (rank == liar))


def test_ranks_that_hear_each_other_have_nothing_to_tell() -> None:
    assert on_ranks(2, exchange, None) == [[], []]


def test_a_rank_that_gives_a_wrong_answer_is_named_to_all() -> None:
    first, second = on_ranks(2, exchange, 1)
    assert first == second
    for size in preflight.SIZES:
        assert f"all_gather of {size}: rank 1 gave a wrong answer" in first
        assert f"broadcast of {size}: rank 1 gave a wrong answer" in first
        assert f"all_reduce of {size}: the sum is wrong" in first


def test_processes_that_srun_started_meet_at_the_given_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        slurm = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_ID": 0,
                 "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}  # fmt: skip
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "dtt.runtime.preflight", "--cpu"],
                env=os.environ | place | {name: str(value) for name, value in slurm.items()},
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "2 x cpu, all exchanges are right" in said[0]
