"""Communication of the data stages: barrier, broadcast, gather.

`Serial` is one process; `Mpi` is many, through mpi4py; `Files` (rendezvous.py) is many that share a
file system. Values are JSON. Bulk data is never sent: each rank writes its own files.
"""

from __future__ import annotations

import math
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dtt.base.errors import EnvironmentUnfit
from dtt.base.ranks import Ranks
from dtt.base.rendezvous import RENDEZVOUS, Files, launch_name
from dtt.mesh.environment import install

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds for which a rank that failed waits for the others to end by themselves."""
FORWARDING = 0.3
"""Seconds for mpirun to forward a rank's last output: an abort drops what mpirun has not yet
read."""


class Comm(Protocol):
    """The collectives of the data stages. Values are JSON: tuples are received as lists."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier."""

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank."""
        return [value]

    def close(self) -> None:
        """Leave the group, after the last collective."""


class Serial(Comm):
    """Collectives of a single process."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        """Return immediately."""

    def close(self) -> None:
        """Do nothing: there is no other rank."""


class Mpi:
    """Collectives of the ranks of one `mpirun` or `srun --mpi=…`.

    They poll with short sleeps: MPI's blocking calls spin, which slows down ranks that still work
    when there are as many ranks as cores.
    """

    def __init__(self, mpi: Any) -> None:
        """Use the module `mpi4py.MPI`."""
        self._mpi = mpi
        self._world = mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier; exit if one of them has failed instead."""
        code = self._largest(0)
        if code:
            sys.exit(code)

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        self.barrier()
        result: T = self._world.bcast(value, root=0)
        return result

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank."""
        self.barrier()
        result: list[T] = self._world.allgather(value)
        return result

    def close(self) -> None:
        """Finalise MPI."""
        self._mpi.Finalize()

    def fail(self, code: int, reason: str) -> None:
        """End the other ranks with exit code `code`; `reason` has been printed.

        Most errors are found by all ranks, or by rank 0 while the others wait for it at a barrier.
        Then all exit by themselves, without the message of MPI_Abort, which looks like a crash.
        Ranks that still work do not arrive in time, so MPI_Abort ends them.
        """
        if self._largest(code, PATIENCE) is None:
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(FORWARDING)
            self._world.Abort(code)

    def _largest(self, code: int, timeout: float = math.inf) -> int | None:
        """Return the largest `code` of all ranks; None if they do not arrive in time.

        This is the barrier: its value tells the ranks that wait that another one has failed.
        """
        mine, largest = array("i", [code]), array("i", [0])
        arrived = self._world.Iallreduce(mine, largest, op=self._mpi.MAX)
        pause, deadline = 1e-5, time.monotonic() + timeout
        while not arrived.Test():
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        return largest[0]


_groups: list[Files | Mpi] = []
"""The open group of ranks, at most one, through which `abort_peers` ends the others."""


def open_comm(ranks: Ranks, work: Path) -> Comm:
    """Return the Comm for the launcher of this process.

    Tasks of Slurm's `srun` that share no MPI communicator use files in `work`, a folder that all
    ranks see. Raises EnvironmentUnfit under torchrun, or if the ranks cannot communicate.
    """
    if ranks.size == 1:
        return Serial()
    if ranks.launcher == "torchrun":
        raise EnvironmentUnfit(
            "this command runs under mpirun, not torchrun",
            next=f"mpirun -n {ranks.size} dtt …",
        )
    comm = _mpi(ranks)
    if comm is not None:
        _groups.append(comm)
        return comm
    group = Files(ranks.rank, ranks.size, work / RENDEZVOUS / launch_name(os.environ))
    _groups.append(group)
    return group


def _mpi(ranks: Ranks) -> Mpi | None:
    """Return MPI's Comm; None if Slurm started the ranks and MPI does not connect them."""
    by_slurm = ranks.launcher == "slurm"
    if by_slurm and not any(name.startswith("PMI") for name in os.environ):
        return None  # some MPI libraries exit in a step without PMI
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no libmpi to load
        if by_slurm:
            return None
        raise EnvironmentUnfit(
            f"{ranks.size} processes were started, but they cannot communicate with each other",
            why=f"mpi4py: {str(error).splitlines()[0]}",
            next=f"{install('mpi')}; where the machine has no MPI library: {install('mpich')}",
        ) from None
    comm = Mpi(MPI)
    if comm.size == ranks.size:
        return comm
    if by_slurm and comm.size == 1:
        return None
    raise EnvironmentUnfit(
        f"the launcher started {ranks.size} processes, but MPI sees {comm.size}",
        why="mpirun and the MPI library that mpi4py loads are different implementations",
        next=f"use the mpirun of the same MPI, or {install('mpich')} and its mpirun",
    )


def abort_peers(code: int, reason: str) -> None:
    """End every other rank with exit code `code`; do nothing without other ranks.

    A rank that merely exits would leave the others waiting for it.
    """
    if _groups:
        _groups[-1].fail(code, reason)
