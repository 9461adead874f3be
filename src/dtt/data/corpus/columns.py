"""Columns of a file: their names, and the kinds of their values."""

from __future__ import annotations

from pathlib import Path

from dtt.base.errors import ConfigError

Kinds = dict[str, str]
"""The columns of a file, by name, and the kind of their values."""
TEXT, NOTHING = "text", "null"
"""Kinds of columns: text, and only nulls in the part that was read."""


def check_names(path: Path, names: list[str]) -> None:
    """Raise ConfigError if two columns have one name: a reader by name would take either."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two columns are called {twice[0]!r}",
            where=path,
            why="so it is unknown which of them holds the text",
            next="write the file again with other names",
        )
