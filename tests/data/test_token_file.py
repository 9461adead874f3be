"""The `.bin`/`.idx` pair is Megatron's, whole or refused."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.ranks import on_ranks
from support.token_files import read_documents

from dtt.base.errors import DamagedError, InputError
from dtt.data.token_file import (
    TokenFile,
    TokenFileWriter,
    bin_path,
    idx_path,
    map_file,
    token_dtype,
)
from dtt.mesh.dist import World

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [1, 2, 3, 4, 0]]


def write(stem: Path, documents: list[list[int]], vocab_size: int = 300) -> None:
    with TokenFileWriter(stem, vocab_size) as writer:
        for document in documents:
            writer.append(np.array(document), np.array([len(document)]))
        writer.close()


def megatron_index(
    code: int, lengths: list[int], offsets: list[int], documents: list[int]
) -> bytes:
    """The index as Megatron's own writer lays it out, field by field."""
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(documents))
        + np.array(lengths, np.int32).tobytes()
        + np.array(offsets, np.int64).tobytes()
        + np.array(documents, np.int64).tobytes()
    )


def test_documents_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    file = TokenFile(tmp_path / "a")
    assert [one.tolist() for one in read_documents(tmp_path / "a")] == DOCUMENTS
    assert file.dtype == np.uint16
    assert (file.total, len(file)) == (11, 3)
    assert file.documents.tolist() == [0, 1, 2, 3]
    assert file.bounds().tolist() == [0, 4, 6, 11]


def test_index_is_byte_for_byte_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    expected = megatron_index(8, [4, 2, 5], [0, 8, 12], [0, 1, 2, 3])
    assert (tmp_path / "a.idx").read_bytes() == expected


def test_dtype_follows_the_vocabulary_as_in_megatron(tmp_path: Path) -> None:
    assert token_dtype(65_499) == "uint16"
    assert token_dtype(65_500) == "int32"
    write(tmp_path / "big", [[100_000, 0]], vocab_size=151_643)
    assert read_documents(tmp_path / "big")[0].tolist() == [100_000, 0]
    assert bin_path(tmp_path / "big").stat().st_size == 8


def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path) -> None:
    for wrong in (300, 65_536 + 5, -1):
        with (
            pytest.raises(DamagedError, match="outside the vocabulary"),
            TokenFileWriter(tmp_path / "a", 300) as writer,
        ):
            writer.append(np.array([1, wrong]), np.array([2]))
        assert bin_path(tmp_path / "a").stat().st_size == 0


def test_a_file_of_no_documents_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a", [])
    file = TokenFile(tmp_path / "a")
    assert len(file) == file.total == 0


def test_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    bin_path(tmp_path / "a").unlink()
    with pytest.raises(InputError, match=r"a\.bin"):
        TokenFile(tmp_path / "a")
    with pytest.raises(InputError, match=r"b\.idx"):
        TokenFile(tmp_path / "b")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    for path in (bin_path(tmp_path / "a"), idx_path(tmp_path / "a")):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DamagedError, match=r"a\.idx"):
                TokenFile(tmp_path / "a")
        path.write_bytes(whole + b"\0\0")
        with pytest.raises(DamagedError):
            TokenFile(tmp_path / "a")
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (b"not an index, but long enough to be one", "MMIDIDX"),
        (megatron_index(8, [], [], [0])[:9] + struct.pack("<Q", 2) + bytes(17), "version 2"),
        (megatron_index(7, [], [], [0]), "integer type"),
        (megatron_index(99, [], [], [0]), "integer type"),
    ],
)
def test_a_file_that_is_not_a_token_file_is_refused(tmp_path: Path, index: bytes, why: str) -> None:
    bin_path(tmp_path / "a").write_bytes(b"")
    idx_path(tmp_path / "a").write_bytes(index)
    with pytest.raises(DamagedError, match=why):
        TokenFile(tmp_path / "a")


def peaks(_: World, folder: Path) -> list[int]:
    """Bytes of memory that writers of few and of many sequences take."""
    found = []
    for appends in (1_000, 4_000):
        tracemalloc.start()
        with TokenFileWriter(folder / str(appends), 100) as writer:
            for _ in range(appends):
                writer.append(np.zeros(1000, np.uint16), np.ones(1000, np.int32))
            writer.close()
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return found


def test_the_memory_of_a_writer_does_not_grow_with_its_sequences(tmp_path: Path) -> None:
    # In a process of its own: tracemalloc counts what all threads of a process allocate.
    [(few, many)] = on_ranks(1, peaks, tmp_path)
    assert many < 1.1 * few


def test_a_mapped_array_is_the_file(tmp_path: Path) -> None:
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
