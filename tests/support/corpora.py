"""Small corpora of every format: their files, and all that is read of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import JsonRow, read_rows, read_unit
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus


def json_lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def comma_separated(texts: Sequence[str]) -> bytes:
    stream = io.StringIO()
    csv.writer(stream).writerows([("text",), *((text,) for text in texts)])
    return stream.getvalue().encode()


def parquet(texts: Sequence[str] = (), row_group_size: int = 40, **columns: list[Any]) -> bytes:
    """A file of the column `text`, or of other columns."""
    stream = io.BytesIO()
    table = pa.table(columns or {"text": pa.array(texts, pa.string())})
    pq.write_table(table, stream, row_group_size=row_group_size)
    return stream.getvalue()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_texts(corpus: Corpus, unit_bytes: int = 10**6) -> tuple[list[str], BadDocuments]:
    """All documents, cut into units of a given size, and those that cannot be read."""
    bad = BadDocuments()
    units = corpus.units(unit_bytes)
    return [text.decode() for unit in units for text in read_unit(corpus, unit, bad)], bad


def read_all_rows(corpus: Corpus) -> tuple[list[JsonRow], BadDocuments]:
    """All rows, and those that cannot be read."""
    bad = BadDocuments()
    found = (read_rows(corpus, unit, bad) for unit in corpus.units(10**6))
    return [row for unit in found for batch in unit for row in batch], bad


def downloaded(dataset: Path, out: Path, *, rows: bool = False) -> Corpus:
    """A corpus made from a file or folder."""
    download(DownloadConfig(dataset=str(dataset)), out, rows=rows)
    return Corpus(out)
