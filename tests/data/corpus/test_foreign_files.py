"""Files as other tools write them are read as meant, or refused with what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtt.base.errors import ConfigError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus

LINES = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(50))


def documents(folder: Path, dataset: Path) -> tuple[list[bytes], BadDocuments]:
    """What is read of a data set, and what is not."""
    download(DownloadConfig(dataset=str(dataset)), folder)
    corpus, bad = Corpus(folder), BadDocuments()
    return [text for unit in corpus.units(10**6) for text in read_unit(corpus, unit, bad)], bad


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
