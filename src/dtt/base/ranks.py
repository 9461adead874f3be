"""Rank and world size of this process, read from the launcher's environment variables.

Nothing is started or connected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtt.base.reading import is_kind

Launcher = Literal["torchrun", "openmpi", "pmi", "slurm", "alone"]


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among the processes of one command."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "alone"

    @property
    def first(self) -> bool:
        """True on rank 0, which prints, and writes the files that are written once."""
        return self.rank == 0

    @classmethod
    def detect(cls, env: Mapping[str, str] | None = None) -> Ranks:
        """Read variables of torchrun, Open MPI, PMI (MPICH, Intel, Cray) or Slurm, in that order.

        MPI comes before Slurm because ranks that `mpirun` starts inside a job see Slurm's variables
        too. A batch script (no step) is one process, regardless of the size of its job. Under `srun
        --mpi=pmi2`, PMI provides the rank and Slurm the local rank.
        """
        env = os.environ if env is None else env

        def number(name: str, default: int = 0) -> int:
            return int(env.get(name, default))

        def of(launcher: Launcher, *names: str) -> Ranks:
            rank, size, local_rank, local_size = map(number, names, (0, 1, 0, 1))
            return Ranks(rank, size, local_rank, local_size, launcher)

        if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
            return of("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "OMPI_COMM_WORLD_RANK" in env:
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
            return of("openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in names))
        if "PMI_RANK" in env:
            return cls(
                number("PMI_RANK"),
                number("PMI_SIZE", 1),
                number("MPI_LOCALRANKID", number("PALS_LOCAL_RANKID", number("SLURM_LOCALID"))),
                number("MPI_LOCALNRANKS", _tasks_here(env)),
                "pmi",
            )
        if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "batch").isdigit():
            return cls(
                number("SLURM_PROCID"),
                number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1)),
                number("SLURM_LOCALID"),
                _tasks_here(env),
                "slurm",
            )
        return cls()


def _tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of a Slurm step's tasks on this node; 1 outside a step.

    Slurm writes `4(x2),3` for 4, 4 and 3 tasks on the step's nodes 0, 1 and 2.
    """
    node = int(env.get("SLURM_NODEID", 0))
    for group in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, nodes = group.rstrip(")").partition("(x")
        node -= int(nodes or 1)
        if node < 0:
            return int(tasks)
    return 1


def slurm_id(env: Mapping[str, Any]) -> str | None:
    """Return the id of a Slurm job, as squeue lists it, from the environment of the job."""
    id = env.get("SLURM_JOB_ID")
    if {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= env.keys():
        id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return id if is_kind(id, str) else None
