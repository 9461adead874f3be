"""The command `dtt pipeline`."""

from __future__ import annotations

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, Quiet


@cli.command(
    "dtt pipeline -c quickstart",
    "dtt pipeline -c quickstart -d ~/books name=books",
    kept="finished stages are kept; run the same command to continue",
)
def pipeline(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run download, clean, tokenize, train and export in order.

    If the configuration defines stages of training, trains each of them in turn and exports the
    last. Skips finished work, so the same command resumes after an interruption.
    """
    from dtt.launch import pipeline

    pipeline.run(config, overrides or [], dataset, as_json=json)
