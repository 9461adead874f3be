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


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPENMPI, "openmpi"),
        (MPICH, "pmi"),
        (STEP, "slurm"),
        (STEP | OPENMPI, "openmpi"),
        (STEP | MPICH, "pmi"),
        (STEP | TORCHRUN, "torchrun"),
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "pmi"),  # srun --mpi=pmi2
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_launcher_is_understood_also_inside_a_slurm_job(
    env: dict[str, str], launcher: str
) -> None:
    assert Ranks.detect(env) == Ranks(5, 8, 1, 4, launcher)  # type: ignore[arg-type]


def test_a_process_started_by_hand_is_alone() -> None:
    assert Ranks.detect({"PATH": "/bin"}) == Ranks(0, 1, 0, 1, "alone")
    assert Ranks.detect({"PATH": "/bin"}).first


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "batch"}])
def test_a_batch_script_is_one_process_whatever_its_job(step: dict[str, str]) -> None:
    assert Ranks.detect(BATCH | step) == Ranks()


def test_uneven_slurm_nodes_give_this_nodes_count() -> None:
    step = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert [Ranks.detect(step | {"SLURM_NODEID": node}).local_size for node in "012"] == [4, 4, 3]


def test_variables_without_torchrun_count_only_together() -> None:
    alone = {"RANK": "3"}  # other tools set it too
    assert Ranks.detect(alone) == Ranks()
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "localhost"}
    assert Ranks.detect(by_hand).launcher == "torchrun"


def test_every_rank_of_a_real_mpirun_is_detected(mpirun: MpiRun) -> None:
    run = mpirun(2, "-c", "from dtt.base.ranks import Ranks; print(Ranks.detect())")
    launcher = "openmpi" if "openmpi" in run.stdout else "pmi"
    assert sorted(run.stdout.splitlines()) == [
        str(Ranks(rank, 2, rank, 2, launcher)) for rank in range(2)
    ]
