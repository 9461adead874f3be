"""The command `dtt wandb`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Json, argument, option


@cli.command(
    "dtt wandb jobs/stories",
    "dtt wandb jobs/lr/* --project sweeps --json",
    "dtt wandb --from team/old/1a2b3c4d --entity team --project new",
)
def wandb_(
    sources: Annotated[
        list[str] | None, argument("[JOB]…", "Job directories; with --from, more runs.")
    ] = None,
    copied: Annotated[
        list[str] | None,
        option(
            "--from",
            "Copy this run instead: history, config, summary, name, group, tags.",
            metavar="ENTITY/PROJECT/RUN",
        ),
    ] = None,
    project: Annotated[
        str | None, option("W&B project; default: that of the job's tracker or the run, else dtt.")
    ] = None,
    entity: Annotated[
        str | None, option("W&B team or user; default: that of the job's tracker, else yours.")
    ] = None,
    json: Json = False,
) -> None:
    """Upload the metrics of jobs to Weights & Biases, or copy runs to another project.

    Sends every record of metrics.jsonl, of finished and running jobs, tracked or not. Running it
    again sends what is new, without duplicates.
    """
    from dtt.report import wandb_upload

    wandb_upload.upload(sources or [], copied or [], project=project, entity=entity, as_json=json)
