"""Mapped files: the bytes of the file, gone when nobody looks any more."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dtt.data.memory_map import map_file


def test_the_array_is_the_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(10_001)
    (tmp_path / "a").write_bytes(content)
    array = map_file(tmp_path / "a")
    assert array.tobytes() == content
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    (tmp_path / "empty").write_bytes(b"")
    assert map_file(tmp_path / "empty").view("<i8").tolist() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_map_lives_as_long_as_its_views(tmp_path: Path) -> None:
    path = tmp_path / "mapped-here"
    path.write_bytes(np.arange(100, dtype="<u2").tobytes())

    def mapped() -> bool:
        return path.name in Path("/proc/self/maps").read_text()

    part = map_file(path).view("<u2")[50:]
    path.unlink()
    assert mapped()
    assert part.tolist() == list(range(50, 100))
    del part
    assert not mapped()
