"""Start a dtt command on this machine, as one process or several, and be its good parent."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def dtt_argv(*arguments: str) -> list[str]:
    """The command line of `dtt ARGUMENTS` with this very Python."""
    return [sys.executable, "-m", "dtt.main", *arguments]


def mpi_argv(processes: int, argv: Sequence[str]) -> list[str] | None:
    """`argv` under mpirun; None when this Python cannot speak MPI or there is no mpirun.

    The mpirun beside this Python comes first: it belongs to the library mpi4py finds there.
    """
    beside = shutil.which("mpirun", path=Path(sys.executable).parent)
    mpirun = beside or shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return [mpirun, "-n", str(processes), *argv]


def torchrun_argv(processes: int, arguments: Sequence[str]) -> list[str]:
    """`dtt ARGUMENTS` as so many processes of one torchrun on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(processes), "-m", "dtt.main", *arguments]


def without_slurm() -> dict[str, str]:
    """Our environment, such that mpirun starts its processes here by itself.

    Inside a step of Slurm it would ask for another step, which waits for this one to end.
    """
    theirs = ("SLURM_", "SLURMD_", "PMI_", "PMI2_", "PMIX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


def run(
    argv: Sequence[str], env: Mapping[str, str] | None = None, *, stdout: IO[str] | None = None
) -> int:
    """Run to the end, in our environment or `env`; returns the exit code, 128 + n after signal n.

    The child has its own process group and gets each SIGINT and SIGTERM that we get, once: so it
    can save and stop. If we are killed, it is told to stop (Linux).
    """
    child = subprocess.Popen(
        argv,
        env=env,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=stop_with_parent,  # noqa: PLW1509  a system call and nothing else
    )

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    previous = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def stop_with_parent() -> None:
    """In a child, before it becomes its program: ask for SIGTERM when the parent dies (Linux)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
