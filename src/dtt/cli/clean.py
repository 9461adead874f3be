"""The command `dtt clean`."""

from __future__ import annotations

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, Quiet, Stage, resolve


@cli.command(
    "dtt clean -c run.yaml clean.near.threshold=0.8",
    "mpirun -n 8 dtt clean -c run.yaml",
    kept="the finished units are kept; run the same command to continue",
    ends_at_once=True,
)
def clean(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose the documents to train on: no duplicates, and none that a filter removes.

    Reads data/corpus/<dataset>/, writes a folder selection-* there; the corpus is not changed. The
    output does not depend on the number of processes. The same command resumes after an
    interruption.
    """
    from dtt.clean import run as clean

    cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
    clean.run(cfg, as_json=json)
