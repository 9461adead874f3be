from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.data.corpus import download
from dtt.launch.chain import EXPORT, RATES, START, TEXT_IN_A_BYTE, expected_seconds


def configured(folder: Path, *changes: str) -> RunConfig:
    named = [f"download.out={folder}/corpus", f"download.dataset={folder}/texts", *changes]
    return resolve(None, named, env={}).config


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    return tmp_path


def test_the_size_of_files_decides_before_and_after_a_download(texts: Path) -> None:
    cfg = configured(texts)
    (texts / "texts/a.txt").write_text("a line\n" * 100_000)
    for _ in range(2):
        assert expected_seconds("tokenize", cfg, 2) == START + 700_000 / RATES["tokenize"] / 2
        assert expected_seconds("download", cfg, 4) == START + 700_000 / RATES["download"]
        download.run(cfg)


@pytest.mark.parametrize("ending", [".parquet", ".gz"])
def test_packed_files_have_more_text(texts: Path, ending: str) -> None:
    file = texts / "texts" / f"a{'.txt' if ending == '.gz' else ''}{ending}"
    if ending == ".gz":
        file.write_bytes(gzip.compress(b"some text\n" * 10_000))
    else:
        pq.write_table(pa.table({"text": ["some text"] * 10_000}), file)
    text = file.stat().st_size * TEXT_IN_A_BYTE[ending]
    assert expected_seconds("clean", configured(texts), 1) == START + text / RATES["clean"]


@pytest.mark.parametrize("dataset", ["org/name", "s3://bucket/texts"])
def test_what_the_network_decides_is_unknown(texts: Path, dataset: str) -> None:
    cfg = configured(texts, f"download.dataset={dataset}")
    assert [expected_seconds(step, cfg, 1) for step in RATES] == [None] * 3


def test_an_export_takes_time_by_its_parameters(texts: Path) -> None:
    sizes = [
        "model.family=llama", "model.dim=64", "model.n_layers=2", "model.n_heads=2",
        "tokenizer.vocab_size=512",
    ]  # fmt: skip
    small, large = (
        expected_seconds("export", configured(texts, *sizes, *more), 1)
        for more in ((), ("tokenizer.vocab_size=1536",))
    )
    assert small is not None
    assert large is not None
    assert large - small == pytest.approx(2 * 1024 * 64 * EXPORT)  # embedding and head
