"""Commands of `dtt ckpt`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Job, Json, Overrides, argument, option

ckpt_cli = cli.group("ckpt", "Manage the checkpoints of a job.")


@ckpt_cli.command("dtt ckpt ls jobs/run", "dtt ckpt ls jobs/run --verify")
def ckpt_ls(
    source: Annotated[str, argument("JOB[@STEP]", "Checkpoint; default: all of the job.")],
    verify: Annotated[bool, option("--verify", "Verify every file against the manifests.")] = False,
    json: Json = False,
) -> None:
    """List checkpoints, oldest first.

    Reads the manifests only. With --verify, exits with 65 if a checkpoint is damaged.
    """
    from dtt.checkpoint import inspect as ckpt

    (ckpt.verify if verify else ckpt.ls)(source, as_json=json)


@ckpt_cli.command("dtt ckpt prune jobs/run checkpoint.keep_last=1 --dry-run")
def ckpt_prune(
    job: Job,
    overrides: Overrides = None,
    dry_run: Annotated[bool, option("--dry-run", "Print what would be deleted.")] = False,
) -> None:
    """Delete superseded checkpoints and those that the job's retention rules do not keep.

    Always keeps the newest verified checkpoint and the newest from before the last divergence.
    """
    from dtt.checkpoint import inspect as ckpt

    ckpt.prune(job, overrides or [], dry_run=dry_run)


@ckpt_cli.command("dtt ckpt fetch jobs/run", "dtt ckpt fetch s3://bucket/prefix/run 500")
def ckpt_fetch(
    source: Annotated[str, argument("JOB|URL", "Job, or its folder in the mirror.")],
    step: Annotated[int | None, argument("[STEP]", "Step; default: the newest.")] = None,
) -> None:
    """Bring a checkpoint back from checkpoint.mirror, and verify every byte.

    Writes jobs/<name>/checkpoints/step-N/ at once when all files are there. A URL also brings back
    the files of a job whose folder is lost; `dtt train` then resumes it.
    """
    from dtt.checkpoint import fetch

    fetch.run(source, step)
