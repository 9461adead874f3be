"""The `dtt` command, to which the other modules of this package add their commands."""

from __future__ import annotations

from typing import Annotated

import typer

from dtt.cli.parser import Commands

cli = Commands(
    "dtt",
    "Distributed Transformer Training: raw text to a released checkpoint.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from dtt import __version__
        from dtt.artifacts.jobdir import git_state

        # Of a clone, the number alone does not say which code runs.
        state = git_state()
        changed = ", changed" if state is not None and state["diff"] else ""
        commit = "" if state is None else f" ({state['commit'][:8]}{changed})"
        typer.echo(f"dtt {__version__}{commit}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass
