"""Files as other tools write them are read as meant, or refused with what to type."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtt.base.errors import ConfigError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.compressed import MAX_ZSTD_WINDOW, zstd_window
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus

LINES = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(50))


def documents(folder: Path, dataset: Path) -> tuple[list[bytes], BadDocuments]:
    """What is read of a data set, and what is not."""
    download(DownloadConfig(dataset=str(dataset)), folder)
    corpus, bad = Corpus(folder), BadDocuments()
    return [text for unit in corpus.units(10**6) for text in read_unit(corpus, unit, bad)], bad


def zstd_frame(descriptor: int, header: bytes, content: bytes = LINES) -> bytes:
    """One raw block, as in RFC 8878."""
    block = struct.pack("<I", 1 | len(content) << 3)[:3]
    return struct.pack("<IB", 0xFD2FB528, descriptor) + header + block + content


SKIPPABLE = struct.pack("<II", 0x184D2A53, 3) + b"abc"
HUGE = (2**28).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("content", "window"),
    [
        (zstd_frame(0, bytes([21 - 10 << 3])), 2**21),
        (zstd_frame(0, bytes([(27 - 10 << 3) + 1])), 2**27 + 2**24),
        (zstd_frame(0, bytes([31 - 10 << 3])), 2**31),
        (SKIPPABLE + zstd_frame(0, bytes([31 - 10 << 3])), 2**31),
        (zstd_frame(0x20 | 2 << 6, HUGE), 2**28),
        (zstd_frame(0x21 | 2 << 6, b"\1" + HUGE), 2**28),
        (zstd_frame(0x60, struct.pack("<H", len(LINES) - 256)), len(LINES)),
        (b"", 0),
        (b"not zstd", 0),
    ],
)
def test_a_zstd_window_that_cannot_be_read_is_refused_before_anything_else(
    tmp_path: Path, content: bytes, window: int
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.jsonl.zst").write_bytes(content)
    (folder / "b.jsonl").write_bytes(LINES)
    assert zstd_window(folder / "a.jsonl.zst") == window
    if window > MAX_ZSTD_WINDOW:
        with pytest.raises(InputError, match=r"zstd -d --long=31 -c a\.jsonl\.zst"):
            documents(tmp_path / "corpus", folder)
    elif window:
        assert len(documents(tmp_path / "corpus", folder)[0]) == 100


@pytest.mark.parametrize("zeros", [1, 2, 511, 100_000])
@pytest.mark.parametrize("members", [1, 2])
def test_zeros_after_a_gzip_member_are_not_damage(tmp_path: Path, zeros: int, members: int) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES) * members + bytes(zeros))
    found, bad = documents(tmp_path / "corpus", path)
    assert len(found) == 50 * members
    assert bad.count == 0


@pytest.mark.parametrize("rest", [b"garbage", b"\0\0x"])
def test_other_bytes_after_a_gzip_member_are(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES) + rest)
    found, bad = documents(tmp_path / "corpus", path)
    assert len(found) == 50
    assert bad.count == 1


def test_a_member_that_zeros_have_replaced_in_part_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(LINES * 100)
    path.write_bytes(whole[:-50] + bytes(50))
    _, bad = documents(tmp_path / "corpus", path)
    assert bad.count


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="two columns are called 'text'"):
        documents(tmp_path / "corpus", tmp_path / "a.parquet")


METADATA = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


@pytest.mark.parametrize("name", METADATA)
def test_metadata_beside_the_data_is_not_data(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one", "two"]}), folder / "train-00000-of-00001.parquet")
    (folder / name).write_text('{"default": {"features": {}}}')
    (folder / "README.md").write_text("# Data")
    assert documents(tmp_path / "corpus", folder)[0] == [b"one", b"two"]


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
