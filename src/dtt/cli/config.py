"""Commands of `dtt config`."""

from __future__ import annotations

from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Overrides, Stage
from dtt.cli.parser import Commands
from dtt.mesh.process import command

config_cli = Commands(help="Inspect the configuration.")
cli.add_typer(config_cli, name="config")


@config_cli.command()
def show(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    stage: Stage = None,
) -> None:
    """Print the resolved configuration as YAML, with the origin of each value.

    Prints every stage of a configuration with stages of training, or the one that --stage names.
    """
    with command():
        from dtt.cli import config_text as body

        body.show(config, overrides or [], dataset, stage)


@config_cli.command()
def explain(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="Dotted key or section; default: all sections.")
    ] = "",
    config: Config = None,
    stage: Stage = None,
) -> None:
    """Describe a key: its meaning, type and value."""
    with command():
        from dtt.cli import config_text as body

        body.explain(key, config, stage)


@config_cli.command()
def schema() -> None:
    """Print the JSON schema of a config file, for use in editors."""
    with command():
        from dtt.cli import config_text as body

        body.schema()
