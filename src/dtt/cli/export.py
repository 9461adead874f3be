"""The command `dtt export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Checkpoint, Ema, Json, Overrides, Quiet, option


@cli.command(
    "dtt export jobs/run",
    "dtt export jobs/run@500 --upload org/name --private",
    "dtt export jobs/run@500 --upload org/name --revision step-500",
    "dtt export jobs/run --upload s3://bucket/models/run",
    kept="the checkpoint is unchanged; run the same command to export it",
)
def export(
    source: Checkpoint,
    overrides: Overrides = None,
    ema: Ema = False,
    adapter: Annotated[
        bool, option("--adapter", "Export only the adapter, in the format of PEFT.")
    ] = False,
    out: Annotated[Path | None, option("Folder to write to.", metavar="FOLDER")] = None,
    upload: Annotated[
        str | None,
        option("Also upload to this Hub repository, or s3:// folder.", metavar="ORG/NAME|URL"),
    ] = None,
    revision: Annotated[
        str | None,
        option("Branch of that repository, created if absent; default: main.", metavar="BRANCH"),
    ] = None,
    private: Annotated[
        bool, option("--private", "Create a new Hub repository as private.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a checkpoint to a Hugging Face folder and verify it with transformers.

    Reads jobs/<name>/checkpoints/, writes exports/<name>/. Replaces an earlier export of the same
    job once the new one is verified.
    """
    from dtt.hf import export

    export.run(
        source,
        overrides or [],
        ema=ema,
        adapter=adapter,
        out=out,
        upload=upload,
        revision=revision,
        private=private,
        as_json=json,
    )
