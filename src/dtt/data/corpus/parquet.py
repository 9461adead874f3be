"""Reading of row groups of Parquet files, in batches of rows and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.units import Span, text_chunks

MAX_ROWS = 2**16
BUFFER_BYTES = 2**20
"""Bytes read from a Parquet file at once; bounds memory for large row groups."""

D = TypeVar("D")
Convert = Callable[[pa.RecordBatch, Callable[[int], str], int, BadDocuments], list[D]]
"""Function that returns the documents in a batch of rows.

Its other arguments are a function that returns the location of a row of the row group, the number
of the batch's first row, and the record of rows that hold no document."""


def read_span(
    path: Path,
    span: Span,
    column: str | tuple[str, ...] | None,
    convert: Convert[D],
    bad: BadDocuments,
    size: int,
) -> Iterator[list[D]]:
    """Yield the documents in row groups `span`, in lists of about `size` bytes.

    Reads one column, the first and others of a tuple, or all of them if `column` is None.
    """
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            groups = range(span.start, span.stop)
            rows = sum(file.metadata.row_group(group).num_rows for group in groups)
            at_once = max(1, rows * size // max(span.text_bytes, 1))
            for group in groups:
                yield from _row_group(file, path, group, column, at_once, convert, bad)
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
        lost = path.stat().st_size
        bad.add(lambda: str(path), f"cannot be read: {error}", lost_bytes=lost)


def _row_group(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    column: str | tuple[str, ...] | None,
    at_once: int,
    convert: Convert[D],
    bad: BadDocuments,
) -> Iterator[list[D]]:
    row = 0
    where = partial(_row, path, group)
    try:
        for rows in _batches(file, group, column, at_once):
            yield convert(rows, where, row, bad)
            row += len(rows)
        return
    except Exception as error:  # noqa: BLE001
        raise_if_refused(error)
    try:  # read the failed batch again row by row, to keep the rows before the damage
        for rows in islice(_batches(file, group, column, 1), row, None):
            yield convert(rows, where, row, bad)
            row += 1
    except Exception as error:  # noqa: BLE001
        raise_if_refused(error)
        count = file.metadata.row_group(group).num_rows
        why = f"the rest of row group {group}, {count - row} rows, cannot be read: {error}"
        text = column[0] if isinstance(column, tuple) else column
        (chunks,) = text_chunks(path, text, slice(group, group + 1))
        lost = sum(chunk.total_compressed_size for chunk in chunks) * (count - row) // count
        bad.add(partial(where, row), why, lost_bytes=lost, count=count - row)


def _batches(
    file: pq.ParquetFile, group: int, column: str | tuple[str, ...] | None, rows: int
) -> Iterator[pa.RecordBatch]:
    columns = [column] if isinstance(column, str) else column and list(column)
    rows = min(rows, MAX_ROWS)
    found: Iterator[pa.RecordBatch] = file.iter_batches(
        rows, row_groups=[group], columns=columns, use_threads=False
    )
    return found


def _row(path: Path, group: int, row: int) -> str:
    """Return `file, row N`, with N counted from the start of the file."""
    footer = pq.read_metadata(path)
    before = sum(footer.row_group(earlier).num_rows for earlier in range(group))
    return f"{path}, row {before + row}"
