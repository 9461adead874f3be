"""Commands of `dtt mup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, examples, resolve
from dtt.cli.parser import Commands
from dtt.mesh.process import command

mup_cli = Commands(help="Check that hyperparameters transfer across model widths (muP).")
cli.add_typer(mup_cli, name="mup")

Compare = Annotated[
    bool, typer.Option(help="Also run the standard parametrization, for comparison.")
]


Tolerance = Annotated[
    float,
    typer.Option(min=0.0, help="Largest exponent of the width that passes; without muP it is 0.5."),
]


MupOut = Annotated[Path, typer.Option(help="Folder to write the results to.")]


@mup_cli.command(
    "coord-check",
    epilog=examples(
        "dtt mup coord-check -c run.yaml",
        "dtt mup coord-check -c run.yaml --widths 128,256,512 optim.type=adamw",
    ),
)
def mup_coord_check(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    widths: Annotated[
        str, typer.Option(help="Comma-separated values of model.dim.")
    ] = "64,128,256,512",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of each run.")] = 5,
    tolerance: Tolerance = 0.35,
    compare: Compare = True,
    out: MupOut = Path("mup"),
    json: Json = False,
) -> None:
    """Check that the size of activations does not depend on the model width.

    Trains small models of several widths. Reads the token files of the run, writes
    mup/coord-check.png and .json. Exits with 76 if the check fails. The base width is
    scaling.base_dim, or the smallest of --widths.
    """
    with command():
        from dtt.mup import run as mup

        # Train at the peak rate without warm-up: that of the run may be longer than `steps`.
        options = {"download.dataset": dataset, "train.steps": steps, "schedule.warmup": 0}
        cfg = resolve(config, overrides, options)
        mup.coord_check(cfg, widths, tolerance=tolerance, compare=compare, out=out, as_json=json)


@mup_cli.command(
    "transfer",
    epilog=examples(
        "dtt mup transfer -c run.yaml",
        "dtt mup transfer -c run.yaml --lrs 1e-3,2e-3,4e-3,8e-3 --steps 200 --seeds 3",
    ),
)
def mup_transfer(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    widths: Annotated[
        str, typer.Option(help="Comma-separated values of model.dim.")
    ] = "64,128,256",
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated values of optim.lr; default: 1/8 to 8 times that of the config."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of each run.")] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per width and rate.")] = 1,
    tolerance: Tolerance = 0.35,
    compare: Compare = True,
    out: MupOut = Path("mup"),
    json: Json = False,
) -> None:
    """Check that the best learning rate does not depend on the model width.

    Trains a small model for each width and rate, one after the other; all other learning rates are
    scaled in proportion. Reads the token files of the run, writes mup/transfer.png and .json. Exits
    with 76 if the check fails.
    """
    with command():
        from dtt.mup import run as mup

        options = {"download.dataset": dataset, "train.steps": steps}
        configured = resolve(config, overrides, {"download.dataset": dataset})
        options |= mup.short_warmup(configured, steps)
        mup.transfer(
            resolve(config, overrides, options),
            widths,
            lrs,
            seeds=seeds,
            tolerance=tolerance,
            compare=compare,
            out=out,
            as_json=json,
        )
