"""The command `dtt download`."""

from __future__ import annotations

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Overrides, Quiet, Stage, resolve


@cli.command(
    "dtt download -d python-stdlib",
    "dtt download -d ~/books",
    "dtt download -d s3://bucket/prefix 'download.exclude=[old/]'",
    "dtt download -d HuggingFaceFW/fineweb-edu download.name=sample-10BT",
    kept="the downloaded files are kept; run the same command to continue",
)
def download(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    stage: Stage = None,
    quiet: Quiet = False,
) -> None:
    """Download raw documents.

    Writes data/corpus/<dataset>/. Downloads only missing files, and uses local files in place.
    """
    from dtt.data.corpus import download

    cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
    if cfg.eval.tasks:
        from dtt.evaluate.evaluation import fetch_questions

        fetch_questions(cfg.eval)
    if cfg.download.is_named or not cfg.eval.tasks:
        download.run(cfg)
