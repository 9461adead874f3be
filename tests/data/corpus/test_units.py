"""Units are cut by the data, hold every document once, and say where a bad one is."""

from __future__ import annotations

import gzip
import io
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.corpora import comma_separated, json_lines, parquet, read_texts

from dtt.data.corpus import json_files, units
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.parquet import read_span
from dtt.data.corpus.streams import Span
from dtt.data.corpus.units import Corpus
from dtt.mesh.comm import Serial

TEXTS = [f"document {i}: " + "abc déf 字 " * (i % 17) for i in range(300)]


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": json_lines,
    "a.json": json_lines,
    "a.jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    "a.jsonl.zst": lambda texts: zstandard.compress(json_lines(texts)),
    "a.parquet": lambda texts: parquet(texts, 20),
    "a.csv": comma_separated,
    "a.csv.gz": lambda texts: gzip.compress(comma_separated(texts)),
    "a.txt": lambda texts: "\n".join(texts).encode(),
    "a.txt.zst": lambda texts: zstandard.compress("\r\n".join(texts).encode()),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit_bytes", [100, 4096, 10**9])
def test_every_document_is_read_once_for_any_unit_size(
    corpora: Any, name: str, unit_bytes: int
) -> None:
    corpus = corpora.make({name: FORMATS[name](TEXTS)}, txt_documents="line")
    texts, bad = read_texts(corpus, unit_bytes)
    assert texts == TEXTS
    assert bad.count == 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_small_units_are_many_and_many_small_files_are_few_units(corpora: Any, name: str) -> None:
    content = FORMATS[name](TEXTS)
    assert len(corpora.make({name: content}).units(4096)) > 3
    corpora.folder = corpora.folder / "many"
    corpus = corpora.make({f"{i}/{name}": content for i in range(20)})
    assert len(corpus.units(10**9)) == 1


def test_the_default_unit_size_is_a_power_of_two_within_bounds(
    corpora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 100)
    monkeypatch.setattr(units, "MAX_UNIT_BYTES", 3000)
    folder, sizes = corpora.folder, {}
    for count in (1, 127, 128, 1200, 1201, 2047, 2048, 9999):
        corpora.folder = folder / str(count)
        sizes[count] = corpora.make({"a.txt": (b"a" * 63 + b"\n") * count}).unit_bytes()
    assert sizes == {
        1: 100, 127: 100, 128: 128, 1200: 1024, 1201: 1024, 2047: 1024, 2048: 2048, 9999: 3000
    }  # fmt: skip


def test_line_ends_at_any_unit_boundary_lose_nothing(corpora: Any) -> None:
    lines = ["a", "bb", "ccc", "d" * 40, "e"]
    corpus = corpora.make({"a.txt": ("\n".join(lines) + "\n").encode()}, txt_documents="line")
    for unit_bytes in range(1, 60):
        assert read_texts(corpus, unit_bytes)[0] == lines


def test_sections_are_the_text_unchanged_and_of_some_kilobytes(corpora: Any) -> None:
    text = "\n\n".join("A line of a paragraph.\n" * (i % 30 + 1) for i in range(200))
    corpus = corpora.make({"a.txt": text.encode()})
    assert corpus.manifest.txt_documents == "section"
    sections, _ = read_texts(corpus, 10**9)
    assert "".join(sections) == text
    assert all(4096 <= len(section) <= 8192 + 100 for section in sections[:-1])
    assert all(section.endswith("\n\n") for section in sections[:-1])
    assert "".join(read_texts(corpus, 10_000)[0]) == text


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_a_column_of_any_type_of_text_is_read(corpora: Any, kind: Any) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([*TEXTS, None], pa.string()).cast(kind)}), stream)
    corpus = corpora.make({"a.parquet": stream.getvalue()})
    assert pq.read_schema(corpus.path(0)).field("text").type == kind
    texts, bad = read_texts(corpus, 10**6)
    assert texts == TEXTS
    assert bad.examples[0].endswith(f"row {len(TEXTS)}: the text is null")


@pytest.mark.parametrize("rows", [5_000, 20_000])
@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_of_parquet_rows_is_bounded_however_often_a_dictionary_is_used(
    tmp_path: Path, rows: int, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = pa.array(["one", "the longest of all " + "x" * 20_000])
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (rows // 2), pa.int32()), once)
    column = texts
    if nested:
        message = pa.StructArray.from_arrays([texts.take(pa.array([0] * rows)), texts], ["a", "b"])
        column = pa.ListArray.from_arrays(list(range(0, rows + 1, 2)), message)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, row_group_size=rows, store_schema=False)
    assert path.stat().st_size < 2**16
    footer = pq.read_metadata(path)
    span = Span(0, 0, 1, footer.row_group(0).total_byte_size)
    read = read_span(path, span, None if nested else ["text"], BadDocuments(), 2**18)
    counts, sizes = zip(*((len(batch), batch.nbytes) for batch, _ in read), strict=True)
    assert sum(counts) == footer.num_rows
    assert max(sizes) < 3 * 2**18
    assert len(sizes) < footer.num_rows


class RankThread(Serial):
    """One of several ranks, which are threads of this process."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait()
        return list(self._shared)


@pytest.mark.parametrize("count", [3, 12])
def test_a_file_is_opened_once_by_one_rank_if_its_name_allows_an_array(
    corpora: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    arrays = {f"array{i}.json": json.dumps([{"text": t} for t in TEXTS]) for i in range(count)}
    contents = {name: text.encode() for name, text in arrays.items()}
    contents |= {f"lines{i}.jsonl": json_lines(TEXTS) for i in range(count)}
    contents |= {f"packed{i}.json.gz": gzip.compress(json_lines(TEXTS)) for i in range(count)}
    expected = corpora.make(contents)
    opened: list[str] = []
    open_stream = json_files.open_stream

    def counting(path: Path) -> io.BufferedReader:
        opened.append(path.name)
        return open_stream(path)

    monkeypatch.setattr(json_files, "open_stream", counting)
    size = 2
    shared, barrier = [None] * size, threading.Barrier(size)

    def divided(rank: int) -> tuple[int, list[units.Unit]]:
        corpus = Corpus(expected.folder, comm=RankThread(rank, shared, barrier))
        return corpus.unit_bytes(), corpus.units(4096)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(divided, range(size)))
    assert found == [(expected.unit_bytes(), expected.units(4096))] * size
    assert len(opened) == len(arrays)
    assert {Path(name).suffix for name in opened} == {".json"}
