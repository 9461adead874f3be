"""Mapped files: the bytes of the file, no descriptor, and gone when nobody looks any more."""

from __future__ import annotations

import sys
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from dtt.data.memory_map import HUGE_PAGE, clear, map_file, map_into, reserve


def test_the_array_is_the_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(10_001)
    (tmp_path / "a").write_bytes(content)
    array = map_file(tmp_path / "a")
    assert array.tobytes() == content
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    (tmp_path / "empty").write_bytes(b"")
    assert map_file(tmp_path / "empty").view("<i8").tolist() == []


def test_what_cannot_be_mapped_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "a")
    with pytest.raises(OSError, match=str(tmp_path)):
        map_file(tmp_path)  # a folder


def test_a_map_holds_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    before = len(list(Path("/dev/fd").iterdir()))
    maps = [map_file(tmp_path / "a") for _ in range(50)]
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert all(m[99] == ord("x") for m in maps)


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


def test_files_are_mapped_into_their_places_of_one_array(tmp_path: Path) -> None:
    contents = [np.random.default_rng(seed).bytes(PAGESIZE + seed) for seed in range(3)]
    reserved = reserve(6 * PAGESIZE)
    assert reserved.ctypes.data % HUGE_PAGE == 0
    before = len(list(Path("/dev/fd").iterdir()))
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
        place = reserved[2 * number * PAGESIZE :][: len(content)]
        assert map_into(place, tmp_path / str(number)) == len(content)
    assert len(list(Path("/dev/fd").iterdir())) == before
    clear(reserved[: len(contents[0])])
    for number, content in enumerate(contents[1:], 1):
        assert reserved[2 * number * PAGESIZE :][: len(content)].tobytes() == content
    assert map_into(reserved[: len(contents[2])], tmp_path / "2") == len(contents[2])
    assert reserved[: len(contents[2])].tobytes() == contents[2]


def test_a_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 99)
    (tmp_path / "b").write_bytes(b"y" * 100)
    place = reserve(PAGESIZE)[:100]
    map_into(place, tmp_path / "b")
    assert map_into(place, tmp_path / "a") == 99
    assert place.tobytes() == b"y" * 100
    with pytest.raises(FileNotFoundError):
        map_into(place, tmp_path / "c")


def test_more_addresses_than_there_are_cannot_be_reserved() -> None:
    with pytest.raises(OSError, match="memory"):
        reserve(2**60)
