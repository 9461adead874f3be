"""The command `dtt doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Json


@cli.command(
    "dtt doctor",
    "dtt doctor --processes 8 --path jobs",
    "torchrun --standalone --nproc_per_node 8 -m dtt.main doctor",
    "MASTER_ADDR=n1 MASTER_PORT=29500 srun dtt doctor --path jobs",
)
def doctor(
    path: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder on the disk to check.")
    ] = Path("jobs"),
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Device to check: auto, cpu, cuda or cuda:0 (all processes on one GPU)."),
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
