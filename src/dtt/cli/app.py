"""The `dtt` command, to which the other modules of this package add their commands.

Typer parses it; an option given twice is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dtt.mesh import process

VERBOSE = {"--verbose", "-v"}


def _check(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise BadParameter for a repeated option that takes one value, --verbose or --KEY."""
    try:
        _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except Exception:  # noqa: BLE001  Typer parses again and reports the error
        if VERBOSE.intersection(args):
            raise typer.BadParameter(
                "there is no --verbose: progress is logged without it, and DTT_DEBUG=1 shows the "
                "traceback of an error",
                ctx=ctx,
            ) from None
        for key in (arg[2:].partition("=")[0] for arg in args if arg.startswith("--")):
            if "." in key:
                raise typer.BadParameter(
                    f"there is no --{key}: keys of the configuration are arguments, {key}=VALUE",
                    ctx=ctx,
                ) from None
        return
    for option, count in Counter(order).items():
        if count == 1 or option.param_type_name != "option":
            continue
        if not (option.multiple or option.is_flag or option.count):  # then a value would be lost
            name = max(option.opts, key=len)
            how = "; one file can extend others (extends: [FILE, …])" if name == "--config" else ""
            raise typer.BadParameter(
                f"{name} is given {count} times, and takes one value{how}", ctx=ctx
            )


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check(self, ctx, args)
        return super().parse_args(ctx, args)


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check(self, ctx, args)
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A Typer application whose commands reject repeated options."""

    def __init__(self, name: str, help: str, **settings: Any) -> None:
        """Create the application; `settings` are passed to Typer."""
        settings |= {"cls": _Group, "no_args_is_help": True, "rich_markup_mode": None}
        super().__init__(name=name, help=help, **settings)
        self._prefix = f"{name}_"

    def group(self, name: str, help: str) -> Commands:
        """Return a new group of commands below this one."""
        group = Commands(name, help)
        self.add_typer(group)
        return group

    def command(  # type: ignore[override]  # Typer's own takes the parts of a help text
        self, *examples: str, kept: str = "", ends_at_once: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register the decorated function as a command, which ends as `dtt.mesh.process` describes.

        It is named after the function, without the name of the group in front of it. The help text
        shows the `examples`; `kept` is printed after Ctrl-C. With `ends_at_once`, a command that
        succeeded ends without Python's cleanup.
        """
        # Click's \b keeps the line breaks of the paragraph that follows it.
        epilog = "\b\nExamples:\n  " + "\n  ".join(examples) if examples else None

        def register(body: Callable[..., None]) -> Callable[..., None]:
            @wraps(body)  # Typer reads the options from the signature of `body`
            def run(**options: Any) -> None:
                with process.command(kept):
                    body(**options)
                if ends_at_once:
                    process.leave()

            name = body.__name__.removeprefix(self._prefix).strip("_").replace("_", "-")
            register_with_typer = super(Commands, self).command
            return register_with_typer(name, cls=_Command, epilog=epilog)(run)

        return register


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
