"""Ranks that Slurm starts without MPI and that share only a folder: real processes, as srun's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.running import TIMEOUT

from dtt.base.rendezvous import launch_name

Job = list[subprocess.Popen[str]]
Start = Callable[..., Job]

OPEN = """\
import os, sys
from pathlib import Path
from dtt.base.errors import DamagedError
from dtt.mesh.comm import open_comm
from dtt.mesh.process import command
from dtt.base.ranks import Ranks
def ready(): Path(f"ready-{os.environ['SLURM_PROCID']}").touch()
with command():
    comm = open_comm(Ranks.detect(), Path())
"""
HANG = "ready(); open('hold').read()"
"""Until a test opens the other end, which none does: this rank works for long."""


def start_one(code: str, folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | env,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def srun(tmp_path: Path) -> Iterator[Start]:
    """Starts tasks of one Slurm step, `sizes[rank]` or so many; the body is of each."""
    started: Job = []
    os.mkfifo(tmp_path / "hold")

    def start(body: str, ranks: int = 3, only: range | None = None, step: int = 0) -> Job:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        job = []
        for rank in only or range(ranks):
            env = {
                "SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank),
                "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_LOCALID": str(rank),
            }  # fmt: skip
            job.append(start_one(OPEN + lines, tmp_path, env))
        started.extend(job)
        return job

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(job: Job) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    said = [process.communicate(timeout=TIMEOUT) for process in job]
    return [(process.returncode, *words) for process, words in zip(job, said, strict=True)]


def wait_for(path: Path, job: Job) -> None:
    while not path.exists():
        assert all(process.poll() is None for process in job), ends(job)


def test_every_rank_gets_the_broadcast_and_the_gather_in_order_and_no_file_is_left(
    srun: Start, tmp_path: Path
) -> None:
    job = srun(
        "for n in range(20):\n"
        "    word = comm.broadcast({'from': comm.rank, 'n': n})\n"
        "    words = comm.gather([comm.rank, 'é' * 10**comm.rank, n])\n"
        "    comm.barrier()\n"
        "comm.close()\n"
        "print(type(comm).__name__, word, words[2][1] == 'é' * 100, [w[::2] for w in words])"
    )
    said = "Files {'from': 0, 'n': 19} True [[0, 19], [1, 19], [2, 19]]\n"
    assert ends(job) == [(0, said, "")] * 3
    assert not (tmp_path / "rendezvous").exists()


def test_ranks_may_start_and_leave_at_very_different_times(srun: Start, tmp_path: Path) -> None:
    early = srun("ready(); print(comm.gather(comm.rank)); comm.close()", only=range(1, 3))
    for rank in (1, 2):
        wait_for(tmp_path / f"ready-{rank}", early)
    late = srun(
        "print(comm.gather(comm.rank))\n"
        "folder = Path('rendezvous')\n"
        "lines = [*folder.glob('*/00001.lines'), *folder.glob('*/00002.lines')]\n"
        "while not all(line.read_bytes().endswith(b'null]\\n') for line in lines): pass\n"
        "comm.close()",
        only=range(1),
    )
    assert [end[:2] for end in ends(late + early)] == [(0, "[0, 1, 2]\n")] * 3


def test_a_folder_left_by_a_killed_launch_does_not_affect_the_next(
    srun: Start, tmp_path: Path
) -> None:
    killed = srun(f"comm.gather('old'); {HANG}", 2)
    for rank in range(2):
        wait_for(tmp_path / f"ready-{rank}", killed)
    for process in killed:
        process.kill()
    assert len(list(tmp_path.glob("rendezvous/*/*.lines"))) == 2
    job = srun("print(comm.gather('new')); comm.close()", 2, step=1)
    assert [end[:2] for end in ends(job)] == [(0, "['new', 'new']\n")] * 2


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_reported_and_ends_those_that_wait_for_it(
    srun: Start, tmp_path: Path, killed: int
) -> None:
    job = srun(f"comm.barrier()\nif comm.rank == {killed}: {HANG}\nready(); comm.barrier()")
    for rank in range(3):
        wait_for(tmp_path / f"ready-{rank}", job)
    job[killed].send_signal(signal.SIGKILL)
    reported = ends(job)
    del reported[killed]
    assert [code for code, _, _ in reported] == [78, 78]
    words = f"dtt: rank {killed} is lost: its process has ended\n"
    assert reported[0][2] == words
    assert reported[1][2] == (words if killed == 0 else "")  # rank 0 has said so


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_ends_all_with_its_code_and_its_reason(srun: Start, failing: int) -> None:
    job = srun(
        f"if comm.rank == {failing}: raise DamagedError('this shard is torn', where='x')\n"
        "comm.gather(0)"
    )
    reported = ends(job)
    assert [code for code, _, _ in reported] == [65] * 3
    assert reported[failing][2] == "dtt: this shard is torn\n  where: x\n"
    others = "".join(words for rank, (_, _, words) in enumerate(reported) if rank != failing)
    node = os.uname().nodename
    assert others == ("" if failing == 0 else f"dtt: rank 2 on {node}: this shard is torn\n")


def test_every_launch_has_a_unique_name() -> None:
    env = {"SLURM_CLUSTER_NAME": "a/b", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    names = {
        launch_name(env),
        launch_name(env | {"SLURM_STEP_ID": "2"}),
        launch_name(env | {"SLURM_RESTART_COUNT": "1"}),
        launch_name(env | {"SLURM_JOB_ID": "8"}),
    }
    assert len(names) == 4
    assert not any("/" in name for name in names)
