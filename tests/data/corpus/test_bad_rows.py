"""One bad row costs itself, with its place, and what finding the place reads is bounded."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpora import downloaded, read_all_rows

from dtt.base.errors import DamagedError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.csv_rows import csv_rows
from dtt.data.corpus.documents import read_with_columns
from dtt.data.corpus.download import download
from dtt.data.corpus.streams import location
from dtt.data.corpus.units import Corpus

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
INVALID = pa.array([b"en", b"\xff", b"en"], pa.binary()).view(pa.string())


def rows(folder: Path, name: str) -> tuple[list[dict[str, Any]], BadDocuments]:
    """Read the rows of a file, and those that cannot be read."""
    found, bad = read_all_rows(downloaded(folder / name, folder / "corpus", rows=True))
    return [row.value for row in found], bad


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**62, 0], pa.timestamp("us")),
        pa.array([0, -(2**62), 0], pa.timestamp("us", "UTC")),
        pa.array([0, 2**30, 0], pa.date32()),
        INVALID,
    ],
    ids=["timestamp", "with a zone", "date", "not UTF-8"],
)
def test_a_value_that_python_cannot_hold_costs_its_row(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"messages": [CHAT] * 3, "other": column}), tmp_path / "a.parquet")
    found, bad = rows(tmp_path, "a.parquet")
    assert [row["messages"] for row in found] == [CHAT, CHAT]
    assert bad.count == 1
    assert bad.examples[0].startswith(f"{tmp_path / 'a.parquet'}, row 1: ")


@pytest.mark.parametrize("column", [INVALID, pa.array([0, 2**62, 0], pa.timestamp("us"))])
def test_a_value_of_a_condition_that_cannot_be_read_is_none_and_its_text_stays(
    tmp_path: Path, column: pa.Array
) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"], "x": column}), tmp_path / "a.parquet")
    corpus, bad = downloaded(tmp_path / "a.parquet", tmp_path / "corpus"), BadDocuments()
    (unit,) = corpus.units(10**6)
    ((first, second, third),) = read_with_columns(corpus, unit, ["x"], bad)
    assert [first[0], second, third[0]] == [b"a", (b"b", {"x": None}), b"c"]
    assert first[1]["x"] is not None
    assert bad.count == 1


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl.gz"])
def test_a_damaged_file_is_named_where_documents_are_chosen_by_a_column(
    tmp_path: Path, suffix: str
) -> None:
    whole = {
        "parquet": lambda path: pq.write_table(pa.table({"text": ["a"], "x": [1]}), path),
        "csv": lambda path: path.write_text("text,x\na,1\n"),
        "jsonl.gz": lambda path: path.write_bytes(gzip.compress(b'{"text": "a", "x": 1}\n')),
    }
    path = tmp_path / f"a.{suffix}"
    whole[suffix](path)
    download(DownloadConfig(dataset=str(path)), tmp_path / "corpus")
    path.write_bytes(b'"' * path.stat().st_size)
    corpus, bad = Corpus(tmp_path / "corpus"), BadDocuments()
    (unit,) = corpus.units(10**6)
    with pytest.raises(DamagedError, match=f"damaged\n.*{path}"):
        list(read_with_columns(corpus, unit, ["x"], bad))


def test_the_damage_of_a_csv_file_is_reported_though_its_size_is_no_longer_known(
    tmp_path: Path,
) -> None:
    path, bad = tmp_path / "a.csv.gz", BadDocuments()
    content = b"text\n" + (b"x" * 10_000 + b"\n") * 100
    path.write_bytes(gzip.compress(content, 0)[:-8] + bytes(8))  # a wrong checksum
    found = csv_rows(path, None, bad)
    next(found)
    path.unlink()
    assert len(list(found)) == 99
    assert (bad.count, bad.lost_bytes > 0) == (1, True)
    assert "the rest of the file cannot be read" in bad.examples[0]


def test_each_byte_is_read_about_once_to_name_the_lines_of_all_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bytes_read(lines: int, order: Callable[[list[int]], object]) -> int:
        path = tmp_path / f"{lines}-{id(order)}.jsonl"
        content = b"".join(b"%05d " % i + b"x" * (i % 500) + b"\n" for i in range(lines))
        path.write_bytes(content)
        starts = [*range(1, len(content), 10_000)]
        order(starts)
        counted = 0

        class Counting(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                nonlocal counted
                counted += size or 0
                return super().read(size)

        with monkeypatch.context() as patched:
            patched.setattr("dtt.data.corpus.streams.LINES_STEP", 50_000)
            patched.setattr("dtt.data.corpus.streams.CHUNK_BYTES", 4_096)
            patched.setattr(Path, "open", lambda path, mode: Counting(content))
            found = {start: location(path, start, 1) for start in starts}
        for start, place in found.items():
            line = content.count(b"\n", 0, start) + 1 + (content[start - 1 : start] != b"\n")
            assert place == f"{path}:{line}"
        return counted

    shuffle = random.Random(0).shuffle
    for order in (list.sort, list.reverse, shuffle):
        few, many = bytes_read(1000, order), bytes_read(4000, order)
        assert many < 5 * few, json.dumps([few, many])
