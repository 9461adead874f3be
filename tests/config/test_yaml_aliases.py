"""Aliases of YAML may repeat values, but not multiply them without bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtt.base.errors import ConfigError
from dtt.config.explain import key_types
from dtt.config.source import LARGEST_NODE, read_file

ROWS = [f"  x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 11)]
BOMB = "\n".join(["launch.environment:", "  x0: &a0 [1, 1, 1]", *ROWS])


def test_aliases_that_multiply_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BOMB)
    with pytest.raises(ConfigError, match=f"{LARGEST_NODE:,} values") as error:
        read_file(path, key_types())
    assert "run.yaml:" in str(error.value)


def test_aliases_repeat_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &n 32\nb: *n\nc: &l [1, 2]\nd: [*l, *l]\n")
    _, layer = read_file(path, key_types())
    values = {key: leaf.value for key, leaf in layer.items()}
    assert values == {("a",): 32, ("b",): 32, ("c",): [1, 2], ("d",): [[1, 2], [1, 2]]}
