"""Entry point of the command line: `dtt`, `python -m dtt.main`, `torchrun -m dtt.main train`.

The modules of `dtt.cli` define the commands, in the order in which `dtt --help` lists them. Nothing
slow is imported before a command's body runs.
"""

from __future__ import annotations

import gc
import sys

from dtt.base import interrupts

interrupts.end_at_once()

from dtt.base.terminal import protect_output  # noqa: E402
from dtt.cli.app import cli  # noqa: E402

# Imported to define their commands, in the order in which `dtt --help` lists them.
from dtt.cli import download, clean, tokenize, train, export, pipeline  # noqa: E402, F401  # isort: skip
from dtt.cli import generate, chat, eval, report, submit, doctor, plan, verify  # noqa: E402, F401  # isort: skip
from dtt.cli import job, ckpt, wandb, data, sweep, mup, config  # noqa: E402, F401  # isort: skip


def main() -> None:
    """Entry point of the console script."""
    # Imports create many objects and no garbage: collecting it takes a tenth of the start-up time.
    gc.set_threshold(50_000)
    protect_output()
    _keep_only(sys.argv[1:2])
    cli(prog_name="dtt")


def _keep_only(name: list[str]) -> None:
    """Remove all commands except the one called `name`, if there is one.

    Typer builds the parsers of all registered commands, which takes time.
    """
    commands = [
        command
        for command in cli.registered_commands
        if command.callback is not None and [command.name or command.callback.__name__] == name
    ]
    groups = [group for group in cli.registered_groups if [group.name] == name]
    if commands or groups:
        cli.registered_commands, cli.registered_groups = commands, groups


if __name__ == "__main__":
    main()
