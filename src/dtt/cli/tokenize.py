"""The command `dtt tokenize`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, Quiet, Stage, option, resolve


@cli.command(
    "dtt tokenize -c run.yaml",
    "mpirun -n 8 dtt tokenize -c run.yaml",
    "srun -N 4 -n 64 dtt tokenize -c run.yaml    # no MPI needed",
    kept="the finished units are kept; run the same command to continue",
    ends_at_once=True,
)
def tokenize(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    overwrite: Annotated[
        bool,
        option("--overwrite", "Replace token files made from other text or with other settings."),
    ] = False,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert documents to token files, with a given or a newly trained tokenizer.

    Reads data/corpus/<dataset>/, writes data/tokens/<dataset>-<tokenizer>/. The output does not
    depend on the number of processes. The same command resumes after an interruption.
    """
    from dtt.data.tokenize import run as tokenize

    cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
    tokenize.run(cfg, overwrite=overwrite, as_json=json)
