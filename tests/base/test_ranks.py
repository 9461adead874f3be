"""Each launcher's variables, as its processes see them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from dtt.base.ranks import Ranks

MpiRun = Callable[..., subprocess.CompletedProcess[str]]

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
STEP = BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
}  # fmt: skip


BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "localhost"}
UNEVEN = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, Ranks(5, 8, 1, 4, "torchrun")),
        (OPENMPI, Ranks(5, 8, 1, 4, "openmpi")),
        (MPICH, Ranks(5, 8, 1, 4, "pmi")),
        (STEP, Ranks(5, 8, 1, 4, "slurm")),
        # Within a job of Slurm, and with srun --mpi=pmi2.
        (STEP | OPENMPI, Ranks(5, 8, 1, 4, "openmpi")),
        (STEP | MPICH, Ranks(5, 8, 1, 4, "pmi")),
        (STEP | TORCHRUN, Ranks(5, 8, 1, 4, "torchrun")),
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Ranks(5, 8, 1, 4, "pmi")),
        (UNEVEN, Ranks(5, 8, 1, 4, "slurm")),
        (UNEVEN | {"SLURM_NODEID": "1"}, Ranks(5, 8, 1, 4, "slurm")),
        (UNEVEN | {"SLURM_NODEID": "2"}, Ranks(5, 8, 1, 3, "slurm")),
        # A batch script is one process, whatever its job.
        (BATCH, Ranks()),
        (BATCH | {"SLURM_STEP_ID": "batch"}, Ranks()),
        ({"PATH": "/bin"}, Ranks(0, 1, 0, 1, "alone")),
        # Other tools set RANK, too: without torchrun, its variables count only together.
        ({"RANK": "3"}, Ranks()),
        (BY_HAND, Ranks(3, 4, 3, 1, "torchrun")),
    ],
)  # fmt: skip
def test_every_launcher_is_understood_also_inside_a_slurm_job(
    env: dict[str, str], expected: Ranks
) -> None:
    assert Ranks.detect(env) == expected
    assert expected.first == (expected.rank == 0)


def test_every_rank_of_a_real_mpirun_is_detected(mpirun: MpiRun) -> None:
    run = mpirun(2, "-c", "from dtt.base.ranks import Ranks; print(Ranks.detect())")
    launcher = "openmpi" if "openmpi" in run.stdout else "pmi"
    assert sorted(run.stdout.splitlines()) == [
        str(Ranks(rank, 2, rank, 2, launcher)) for rank in range(2)
    ]
