"""Command-line parsing with Typer, which rejects repeated options and translates old names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from dtt.base.ranks import Ranks

Body = TypeVar("Body", bound=Callable[..., Any])
VERBOSE = {"--verbose", "-v"}
DATASET = {"--dataset": "download.dataset=", "-d": "download.dataset="}
RENAMED = {
    "chat": {"--max-tokens": "--max-new-tokens"},
    "data at-step": {"--limit": "--samples"},
    "data mix": DATASET,
    "download": {"--name": "download.name="},
    "eval": {
        "--batch-tokens": "eval.batch_tokens=",
        "--bos": "eval.bos=",
        "--limit": "eval.limit=",
        "--shots": "eval.shots=",
    },
    "generate": {"--max-tokens": "--max-new-tokens"},
    "mup coord-check": DATASET | {"--steps": "train.steps="},
    "mup transfer": DATASET | {"--steps": "train.steps="},
    "plan": {"--gpus-per-node": "launch.gpus_per_node=", "--nodes": "launch.nodes="},
    "tokenize": {"--explain": "--dry-run"},
}
"""Old names of options by command, and what replaces them: another option, or a key `KEY=`.

An old name works with a warning until the release after the one that renames it. Then its entry
here is deleted, which is all there is to delete.
"""


def _translated(command: Any, ctx: Any, args: Sequence[str]) -> list[str]:
    """Return the arguments with the current names of options; warn about each old name.

    Hidden options would be shorter, but could not become a key, and would be options to keep.
    """
    renamed = RENAMED.get(ctx.command_path.partition(" ")[2], {})
    takes_value = {
        name
        for option in command.params
        if option.param_type_name == "option" and not option.is_flag
        for name in option.opts
    }
    current: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*current, arg, *rest]
        is_long = arg.startswith("--")
        name, given, value = arg.partition("=") if is_long else (arg[:2], arg[2:], arg[2:])
        new = renamed.get(name)
        if new is None:
            current.append(arg)
            if name in takes_value and not given:
                current += islice(rest, 1)  # it may look like an option
            continue
        if Ranks.detect().first:
            typer.echo(f"dtt: warning: {name} is deprecated, use {new}", err=True)
        if not new.endswith("="):
            current.append(f"{new}={value}" if given else new)
        elif given:
            current.append(new + value)
        else:
            current += [new + value for value in islice(rest, 1)] or [arg]  # reported as missing
    return current


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
        args = _translated(self, ctx, args)
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
