"""The configuration keys and command-line options are those listed in surface.txt."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from dtt.config.base import Section
from dtt.config.explain import items, tag, variants
from dtt.config.run import RunConfig
from dtt.main import commands

SURFACE = Path(__file__).with_name("surface.txt")


def keys(cls: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key, such as `schedule[wsd].decay`: the types of a section are in brackets."""
    for name, field in cls.model_fields.items():
        if name != "type" and not variants(field):
            yield prefix + name
        held = variants(field) or items(field)
        for variant in held:
            kind = f"[{tag(variant)}]" if "type" in variant.model_fields else ""
            yield from keys(variant, f"{prefix}{name}{kind}.")


def options(group: Any, path: str) -> Iterator[str]:
    """Yield every option of every command, with all of its spellings."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from options(command, f"{path} {name}")
        else:
            for parameter in command.params:
                if parameter.param_type_name == "option":
                    spellings = [*parameter.opts, *parameter.secondary_opts]
                    yield f"{path} {name} {' '.join(sorted(spellings, key=len))}"


def test_no_key_and_no_option_is_added_or_removed_by_accident() -> None:
    surface = [*sorted(keys()), "", *sorted(options(typer.main.get_command(commands()), "dtt"))]
    text = "\n".join(surface) + "\n"
    if os.environ.get("DTT_WRITE_DOCS"):
        SURFACE.write_text(text, encoding="utf-8")
    frozen = SURFACE.read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(frozen, surface, "tests/surface.txt", "dtt", lineterm="", n=0)
    assert frozen == surface, (
        "The configuration keys or command-line options changed. Every one has to be documented, "
        "tested and kept: is there no key, and no value of one, that does the same? If it has to "
        f"be, DTT_WRITE_DOCS=1 pytest {Path(__file__).name} rewrites surface.txt.\n"
        + "\n".join(changes)
    )
