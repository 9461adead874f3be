"""Commands of `dtt ckpt`."""

from __future__ import annotations

from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Checkpoint, Job, Json, Overrides, examples
from dtt.cli.parser import Commands
from dtt.mesh.process import command

ckpt_cli = Commands(help="Manage the checkpoints of a job.")
cli.add_typer(ckpt_cli, name="ckpt")


@ckpt_cli.command("ls", epilog=examples("dtt ckpt ls jobs/run", "dtt ckpt ls jobs/run --verify"))
def ckpt_ls(
    source: Annotated[
        str, typer.Argument(metavar="JOB[@STEP]", help="Checkpoint; default: all of the job.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify every file against the manifests.")
    ] = False,
    json: Json = False,
) -> None:
    """List checkpoints, oldest first.

    Reads the manifests only. With --verify, exits with 65 if a checkpoint is damaged.
    """
    with command():
        from dtt.checkpoint import inspect as ckpt

        (ckpt.verify if verify else ckpt.ls)(source, as_json=json)


@ckpt_cli.command(
    "prune", epilog=examples("dtt ckpt prune jobs/run checkpoint.keep_last=1 --dry-run")
)
def ckpt_prune(
    job: Job,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted.")
    ] = False,
) -> None:
    """Delete superseded checkpoints and those that the job's retention rules do not keep.

    Always keeps the newest verified checkpoint and the newest from before the last divergence.
    """
    with command():
        from dtt.checkpoint import inspect as ckpt

        ckpt.prune(job, overrides or [], dry_run=dry_run)


@ckpt_cli.command("diff", epilog=examples("dtt ckpt diff jobs/run@500 jobs/run@1000"))
def ckpt_diff(
    one: Checkpoint,
    other: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="Checkpoint to compare with.")],
    json: Json = False,
) -> None:
    """Compare two checkpoints: position, weights, optimizer state.

    Reads both checkpoints and prints their differences.
    """
    with command():
        from dtt.checkpoint import inspect as ckpt

        ckpt.diff(one, other, as_json=json)
