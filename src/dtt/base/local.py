"""Local subprocesses that run dtt commands: command lines, signal forwarding, cleanup."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from dtt.base.interrupts import STOP_SIGNALS

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def dtt_argv(*arguments: str) -> list[str]:
    """Return the command line of `dtt ARGUMENTS` with the current Python interpreter."""
    return [sys.executable, "-m", "dtt.main", *arguments]


def mpi_argv(processes: int, argv: Sequence[str]) -> list[str] | None:
    """Return `argv` under mpirun; None if mpi4py or mpirun is missing.

    The mpirun next to the Python interpreter takes precedence: it belongs to the MPI library that
    mpi4py loads there.
    """
    beside = shutil.which("mpirun", path=Path(sys.executable).parent)
    mpirun = beside or shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return [mpirun, "-n", str(processes), *argv]


def torchrun_argv(processes: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line of `dtt ARGUMENTS` as several processes under one local torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(processes), "-m", "dtt.main", *arguments]


def shell_command(argv: Sequence[str]) -> str:
    """Return a command line as a user would type it."""
    python = shlex.quote(sys.executable)
    text = shlex.join(argv).replace(f"{python} -m torch.distributed.run", "torchrun")
    text = text.replace(f"{python} -m dtt.main", "dtt")
    return text.replace(f"{Path(sys.executable).parent}/", "")


def without_slurm() -> dict[str, str]:
    """Return the environment without Slurm's variables, so that mpirun starts its processes itself.

    Inside a Slurm step, mpirun would otherwise request another step, which waits for this one to
    end.
    """
    theirs = ("SLURM_", "SLURMD_", "PMI_", "PMI2_", "PMIX_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    if os.geteuid() == 0:
        # The user of most containers. Open MPI's mpirun refuses it unless both variables are set.
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def run(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdout: IO[str] | int | None = None,
) -> int:
    """Run a command to its end; return its exit code, 128 + n after signal n.

    The environment is that of this process, or `env`. The command has its own process group and
    receives each SIGINT and SIGTERM of this process exactly once, and SIGTERM for other stop
    signals, so that it can save and stop. If this process is killed, the command receives SIGTERM
    (Linux).
    """
    process = subprocess.Popen(
        argv,
        env=env,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=stop_with_parent,  # noqa: PLW1509  a system call and nothing else
    )

    def forward(number: int, frame: FrameType | None) -> None:
        # torchrun dies of the other signals before its ranks have saved.
        process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)

    # nohup ignores SIGHUP, so that the command outlives its terminal.
    handled = (n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN)
    previous = {n: signal.signal(n, forward) for n in handled}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def stop_with_parent() -> None:
    """Request SIGTERM at the death of the parent (Linux); called in a child before exec."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
