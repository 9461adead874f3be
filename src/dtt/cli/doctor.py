"""The command `dtt doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Json, option


@cli.command(
    "dtt doctor",
    "dtt doctor --processes 8 --path jobs",
    "torchrun --standalone --nproc_per_node 8 -m dtt.main doctor",
    "MASTER_ADDR=n1 MASTER_PORT=29500 srun dtt doctor --path jobs",
)
def doctor(
    path: Annotated[Path, option("Folder on the disk to check.", metavar="FOLDER")] = Path("jobs"),
    processes: Annotated[
        int | None, option("Start N processes on this machine.", min=1, metavar="N")
    ] = None,
    device: Annotated[
        str, option("Device to check: auto, cpu, cuda or cuda:0 (all processes on one GPU).")
    ] = "auto",
    json: Json = False,
) -> None:
    """Check that this machine, or every node of a job, is fit for training.

    Checks versions, devices and the disk. With several processes, also verifies and times every
    collective that training uses, and the links between neighbouring ranks. Writes a temporary file
    to --path. Exits with 78 on a problem.
    """
    from dtt.doctor import run as doctor

    doctor.run(path, device=device, processes=processes, as_json=json)
