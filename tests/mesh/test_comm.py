"""What ranks say to each other, under a real mpirun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtt.base.errors import EnvironmentUnfit
from dtt.base.ranks import Ranks
from dtt.mesh.comm import Serial, open_comm

MpiRun = Callable[..., subprocess.CompletedProcess[str]]

OPEN = """\
from pathlib import Path
from dtt.mesh.comm import open_comm
from dtt.base.ranks import Ranks
comm = open_comm(Ranks.detect(), Path("nowhere"))
"""


def test_a_single_process_needs_no_mpi() -> None:
    comm = open_comm(Ranks(), Path("nowhere"))
    assert isinstance(comm, Serial)
    comm.barrier()
    assert comm.broadcast("x") == "x"
    assert comm.gather("x") == ["x"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_broadcast_of_rank_0_and_the_gather_in_order(
    mpirun: MpiRun, ranks: int
) -> None:
    run = mpirun(
        ranks, "-c", OPEN + "word = comm.broadcast({'from': comm.rank})\n"
        "print(word, comm.gather((comm.rank, 'é' * 10**comm.rank))[-1][0], comm.size)"
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{{'from': 0}} {ranks - 1} {ranks}"] * ranks


def test_a_barrier_is_passed_by_none_before_all_are_there(mpirun: MpiRun, tmp_path: object) -> None:
    run = mpirun(
        2, "-c", OPEN + "from pathlib import Path\n"
        f"mark = Path({str(tmp_path)!r}, 'mark')\n"
        "if comm.rank == 1: sum(range(3_000_000)); mark.touch()\n"
        "comm.barrier(); print(mark.exists())"
    )  # fmt: skip
    assert run.stdout.splitlines() == ["True", "True"], run.stderr


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("raise DamagedError('this shard is torn')", 65, "dtt: this shard is torn"),
        ("open('/nowhere/file')", 66, "no such file or directory"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_rank_that_fails_ends_all_at_once_with_its_code(
    mpirun: MpiRun, fault: str, code: int, says: str
) -> None:
    run = mpirun(
        3, "-c", "from dtt.base.errors import DamagedError\n"
        f"from dtt.mesh.process import command\n{OPEN}"
        "with command():\n"
        f"    if comm.rank == 1: {fault}\n"
        "    comm.barrier()\n"
        "    print('never')"
    )  # fmt: skip
    assert run.returncode == code, run.stderr
    assert says in run.stderr
    assert "never" not in run.stdout


@pytest.mark.parametrize("failing", ["True", "comm.rank == 0", "comm.rank == 2"])
def test_an_error_of_all_ranks_or_of_one_that_the_others_wait_for_ends_without_an_abort(
    mpirun: MpiRun, failing: str
) -> None:
    run = mpirun(
        3, "-c", "from dtt.base.errors import ConfigError\n"
        f"from dtt.mesh.process import command\n{OPEN}"
        "with command():\n"
        "    comm.barrier()\n"
        f"    if {failing}: raise ConfigError('a mistake')\n"
        "    print('never', comm.broadcast(1))"
    )  # fmt: skip
    assert run.returncode == 2
    assert {*run.stderr.splitlines()} == {"dtt: a mistake"}
    assert run.stdout == ""


def test_a_rank_that_still_works_is_ended_by_the_error_of_another(mpirun: MpiRun) -> None:
    run = mpirun(
        2, "-c", "import signal; from dtt.base.errors import ConfigError\n"
        f"from dtt.mesh.process import command\n{OPEN}"
        "with command():\n"
        "    if comm.rank == 0: raise ConfigError('a mistake')\n"
        "    signal.pause()"
    )  # fmt: skip
    assert run.returncode == 2
    assert "dtt: a mistake" in run.stderr


@pytest.mark.parametrize("first", ["", "from mpi4py import MPI\n"], ids=["no MPI", "one rank"])
def test_outside_an_mpi_job_abort_does_nothing(first: str) -> None:
    code = f"{first}from dtt.mesh.comm import abort_peers; abort_peers(3, ''); print('goes on')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "goes on\n"), run.stderr


def test_without_mpi4py_ranks_report_what_to_install() -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from dtt.mesh.process import command\n"
        "from dtt.mesh.comm import open_comm; from dtt.base.ranks import Ranks\n"
        "with command(): open_comm(Ranks(0, 2, 0, 2, 'pmi'), None)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 78
    assert "2 processes were started, but they cannot communicate with each other" in run.stderr
    assert f"{sys.executable} -m pip install 'mpi4py>=4'; where the machine" in run.stderr
    assert "-m pip install 'mpi4py>=4' 'mpich>=4.2'\n" in run.stderr
    assert "Traceback" not in run.stderr


def test_torchrun_is_refused() -> None:
    with pytest.raises(EnvironmentUnfit, match="mpirun -n 4 dtt"):
        open_comm(Ranks(0, 4, 0, 4, "torchrun"), Path("nowhere"))


def test_a_launcher_of_another_mpi_is_detected() -> None:
    code = (
        "from dtt.mesh.process import command\n"
        "from dtt.mesh.comm import open_comm; from dtt.base.ranks import Ranks\n"
        "with command(): open_comm(Ranks(1, 2, 1, 2, 'openmpi'), None)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 78
    assert "the launcher started 2 processes, but MPI sees 1" in run.stderr
