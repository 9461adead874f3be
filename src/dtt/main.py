"""Entry point of the command line: `dtt`, `python -m dtt.main`, `torchrun -m dtt.main train`.

Only the module of the command that is called is imported, and nothing slow before its body runs.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from dtt.base import interrupts

interrupts.end_at_once()

from dtt.base.terminal import protect_output  # noqa: E402
from dtt.cli.app import Commands, cli  # noqa: E402

COMMANDS = (
    "download", "clean", "tokenize", "train", "export", "pipeline",
    "generate", "chat", "eval", "report", "submit", "doctor", "plan", "verify",
    "job", "ckpt", "wandb", "data", "sweep", "mup", "config",
)  # fmt: skip
"""All commands, in the order in which `dtt --help` lists them; each is a module of `dtt.cli`."""


def main() -> None:
    """Entry point of the console script."""
    # Imports create many objects and no garbage: collecting it takes a tenth of the start-up time.
    gc.set_threshold(50_000)
    protect_output()
    commands(*sys.argv[1:2])(prog_name="dtt")


def commands(name: str = "") -> Commands:
    """Return the command line with the command `name`, or with all if there is no such command.

    Opening the modules of the others, and building their parsers, would take longer than many a
    command itself.
    """
    for module in (name,) if name in COMMANDS else COMMANDS:
        import_module(f"dtt.cli.{module}")
    return cli


if __name__ == "__main__":
    main()
