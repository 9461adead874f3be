"""The command `dtt wandb`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Json, examples
from dtt.mesh.process import command


@cli.command(
    name="wandb",
    epilog=examples(
        "dtt wandb jobs/stories",
        "dtt wandb jobs/lr/* --project sweeps --json",
    ),
)
def wandb_(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB…", help="Job directories.")],
    project: Annotated[
        str | None,
        typer.Option(help="W&B project; default: that of the job's tracker, else dtt."),
    ] = None,
    entity: Annotated[
        str | None,
        typer.Option(help="W&B team or user; default: that of the job's tracker, else yours."),
    ] = None,
    json: Json = False,
) -> None:
    """Upload the metrics of jobs to Weights & Biases.

    Sends every record of metrics.jsonl, of finished and running jobs, tracked or not. Running it
    again sends what is new, without duplicates.
    """
    with command():
        from dtt.report import wandb_upload

        wandb_upload.upload(jobs, project=project, entity=entity, as_json=json)
