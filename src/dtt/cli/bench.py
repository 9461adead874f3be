"""The command `dtt bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Overrides, Quiet, examples
from dtt.mesh.process import command


@cli.command(
    epilog=examples(
        "dtt bench                      # list recipes and published results",
        "dtt bench laptop",
        "dtt bench fineweb-3.28 --runs 2",
    )
)
def bench(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="Shipped recipe, or a YAML file (docs/bench.md)."),
    ] = None,
    overrides: Overrides = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of runs, each with its own seed."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe several times, score it, and print it beside published results.

    Downloads the data, writes jobs/bench/<name>/<start>/ with a job per seed and bench.json. The
    same command continues after an interruption. Without RECIPE, lists the recipes.
    """
    with command("finished runs are kept; run the same command to continue"):
        from dtt.bench import run as bench

        bench.run(name, overrides or [], runs=runs)
