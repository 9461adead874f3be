"""Command-line parsing with Typer, which rejects repeated options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Body = TypeVar("Body", bound=Callable[..., Any])
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
        if count > 1 and option.param_type_name == "option" and not _repeatable(option):
            name = max(option.opts, key=len)
            how = "; one file can extend others (extends: [FILE, …])" if name == "--config" else ""
            raise typer.BadParameter(
                f"{name} is given {count} times, and takes one value{how}", ctx=ctx
            )


def _repeatable(option: Any) -> bool:
    """Return True if no value is lost when the option is repeated."""
    return bool(option.multiple or option.is_flag or option.count)


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

    def __init__(self, **settings: Any) -> None:
        """Create the application; `settings` are passed to Typer."""
        super().__init__(cls=_Group, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Body], Body]:
        """Register the decorated function as a command, as Typer does."""
        return super().command(name, cls=_Command, **settings)
