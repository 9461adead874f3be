"""What messages advise exists: each command in a `next:`, with its options, and each key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from support.running import ROOT

from dtt.config import explain
from dtt.config.run import RunConfig
from dtt.main import commands

COMMAND = re.compile(r"(^|`|\brun |\bthen )?\bdtt (?!in )([a-z][^`;,:()\n]*)")
"""A command, and what shows that it is one; elsewhere `dtt` may be the subject of a sentence."""
KEY = re.compile(r"(?<![\w.{/])([a-z_]+(?:\.[a-z_]+)+)=")
HOLE = "X"
"""Stands for a value that the code puts into a text."""


def advice() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each `next=` in the package."""
    for path in sorted((ROOT / "src/dtt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "next":
                for text in texts(node.value):
                    yield f"{path.relative_to(ROOT)}:{node.value.lineno}", text


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in an expression, each f-string as one."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@pytest.fixture(scope="module", name="advised")
def read_advice() -> list[tuple[str, str]]:
    return [*advice()]


def fault(command: Any, words: list[str]) -> str | None:
    """Return what `COMMAND WORDS` names that does not exist; words of a sentence may follow."""
    while words and hasattr(command, "commands") and not words[0].startswith(("-", HOLE)):
        if words[0] not in command.commands:
            return f"there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for param in getattr(command, "params", ()) for name in param.opts}
    for word in words:
        name = word.partition("=")[0].strip(".'\"")
        if re.fullmatch(r"--?[a-z][a-z-]*", name) and name not in {*known, "-h", "--help"}:
            return f"there is no {name}"
    return None


def test_every_command_that_a_message_advises_exists_with_its_options(
    advised: list[tuple[str, str]],
) -> None:
    command: Any = typer.main.get_command(commands())
    found, wrong = 0, []
    for place, text in advised:
        for shows, line in COMMAND.findall(text):
            words = line.split()
            if shows or words[0] in command.commands:
                found += 1
                if why := fault(command, words):
                    wrong.append(f"{place}: dtt {line}: {why}")
    assert found > 100
    assert wrong == []


def test_every_key_that_a_message_advises_exists(advised: list[tuple[str, str]]) -> None:
    known = {".".join(key) for key, _, _ in explain.all_fields()}
    named = {(place, key) for place, text in advised for key in KEY.findall(text)}
    assert len(named) > 50
    sections = RunConfig.model_fields
    keys = {one for one in named if one[1].split(".")[0] in sections}
    # `model.init_std.output` is inside of a free mapping, which is one key.
    wrong = [one for one in keys if not {one[1], one[1].rpartition(".")[0]} & known]
    assert wrong == []
