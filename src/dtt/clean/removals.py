"""Files of removed documents in Parquet, the same bytes for the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class RemovedRow(NamedTuple):
    """A removed document; dtt.artifacts.selection_manifest describes the columns."""

    document: int
    reason: str
    rule: str
    score: float | None = None
    twin_unit: int | None = None
    twin: int | None = None


SCHEMA = pa.schema(
    {
        "document": pa.int64(),
        "reason": pa.string(),
        "rule": pa.string(),
        "twin_unit": pa.int64(),
        "twin": pa.int64(),
        "score": pa.float64(),
    }
)


def encode(rows: Sequence[RemovedRow]) -> bytes:
    """Return the content of a file with these rows, in this order."""
    # By columns: a dictionary for each row would take 800 bytes, and a unit may have a million.
    columns = zip(*rows, strict=True) if rows else ([] for _ in RemovedRow._fields)
    table = pa.table(dict(zip(RemovedRow._fields, map(list, columns), strict=True)), SCHEMA)
    sink = pa.BufferOutputStream()
    # Every setting on which the bytes depend, because defaults change between releases.
    pq.write_table(
        table,
        sink,
        version="2.6",
        compression="zstd",
        compression_level=3,
        use_dictionary=["reason", "rule"],
        write_statistics=True,
        data_page_version="1.0",
        row_group_size=2**20,
        store_schema=False,
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode(path: Path) -> list[RemovedRow]:
    """Return the rows of a file."""
    table = pq.read_table(path)
    columns = (table[name].to_pylist() for name in RemovedRow._fields)
    return list(map(RemovedRow._make, zip(*columns, strict=True)))
