"""Files as other tools write them are read as meant, or refused with what to type."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.corpora import downloaded, json_lines, read_texts

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.data.corpus.bad_documents import BadDocuments

LINES = json_lines([f"document {i}" for i in range(50)])


def documents(folder: Path, dataset: Path) -> tuple[list[str], BadDocuments]:
    """What is read of a data set, and what is not."""
    return read_texts(downloaded(dataset, folder))


METADATA = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


@pytest.mark.parametrize("name", METADATA)
def test_metadata_beside_the_data_is_not_data(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one", "two"]}), folder / "train-00000-of-00001.parquet")
    (folder / name).write_text('{"default": {"features": {}}}')
    (folder / "README.md").write_text("# Data")
    assert documents(tmp_path / "corpus", folder)[0] == ["one", "two"]


def test_a_folder_of_save_to_disk_is_refused_with_the_line_that_converts_it(
    tmp_path: Path,
) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"text": ["one", "two"]})
    data.save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    for name in ("saved", "splits"):
        with pytest.raises(InputError, match=r"load_from_disk.*to_parquet"):
            documents(tmp_path / "corpus", tmp_path / name)


WIDE = struct.pack("<IBB", 0xFD2FB528, 0, 31 - 10 << 3) + struct.pack("<I", 1 | len(LINES) << 3)[:3]
"""The start of a zstd frame with a window of 2 GiB, before a raw block, as in RFC 8878."""


@pytest.mark.parametrize("before", [b"", struct.pack("<II", 0x184D2A53, 3) + b"abc"])
def test_a_zstd_window_that_cannot_be_read_is_refused_with_the_command_that_changes_it(
    tmp_path: Path, before: bytes
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.zst").write_bytes(before + WIDE + LINES)
    with pytest.raises(InputError, match=r"zstd -d --long=31 -c b\.jsonl\.zst"):
        documents(tmp_path / "corpus", folder)


def test_a_later_frame_with_such_a_window_is_refused_by_the_reader(tmp_path: Path) -> None:
    first = zstandard.compress(LINES * 2000)
    (tmp_path / "b.jsonl.zst").write_bytes(first + WIDE + LINES)
    with pytest.raises(InputError, match=r"zstd -d --long=31 -c b\.jsonl\.zst"):
        documents(tmp_path / "corpus", tmp_path / "b.jsonl.zst")


@pytest.mark.parametrize("suffix", ["tsv", "TSV", "tab", "tsv.gz"])
def test_the_columns_of_a_file_with_tabs_are_read(tmp_path: Path, suffix: str) -> None:
    content = b'text\tid\nalpha, beta\tID1\n"two\nlines"\tID2\n'
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    found, bad = documents(tmp_path / "corpus", path)
    assert found == ["alpha, beta", "two\nlines"]
    assert not bad.count


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a.csv", b"id\ttext\n1\ta\n", "name the file .tsv"),
        ("a.tsv", b"id,text\n1,a\n", "write the file again with commas"),
    ],
)
def test_another_separator_than_that_of_the_name_is_refused(
    tmp_path: Path, name: str, content: bytes, remedy: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="not separated by") as refused:
        documents(tmp_path / "corpus", tmp_path / name)
    assert remedy in str(refused.value)


HEADER, GOOD = b"id,text\n", b'1,"good, one"\n'


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (b'2,"He said "no" and left,\nthen, more.\nThe end."\n', 1),  # a stray quote
        (b'2,"never closed\n', 1),
        (b"2,He said, more\n", 2),  # a comma outside of quotes
        (b"2\n", 2),
        (b"2," + b"y" * 2**13 + b"\n", 2),  # no quote, so its end is known
        (b'2,"' + b"y\n" * 2**12 + b'"\n', 1),
    ],
)
def test_no_piece_of_a_broken_csv_row_becomes_a_document(
    tmp_path: Path,
    pack: Callable[[bytes], bytes],
    row: bytes,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dtt.data.corpus.csv_rows.MAX_DOCUMENT_BYTES", 2**12)
    name = "a.csv.gz" if pack is gzip.compress else "a.csv"
    (tmp_path / name).write_bytes(pack(HEADER + GOOD + row + GOOD))
    found, bad = documents(tmp_path / "corpus", tmp_path / name)
    assert found == ["good, one"] * kept
    assert bad.count == 1
    assert bad.examples[0].startswith(f"{tmp_path / name}:3: ")
    assert (bad.lost_bytes > 0) == (kept == 1)


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc"), DamagedError("x")])
@pytest.mark.parametrize("name", ["to_pylist", "iter_batches"])
def test_what_says_nothing_about_the_content_is_no_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")

    def fail(*_: object, **__: object) -> None:
        raise error

    if name == "iter_batches":
        monkeypatch.setattr(pq.ParquetFile, name, fail)
    else:
        monkeypatch.setattr("dtt.data.corpus.documents.is_sound", fail)
    with pytest.raises(type(error)):
        documents(tmp_path / "corpus", tmp_path / "a.parquet")
