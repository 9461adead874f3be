"""Reading of row groups of Parquet files, in batches of rows and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.columns import NOTHING, TEXT, Kinds, check_names
from dtt.data.corpus.streams import FIRST_ROWS, Span

MAX_ROWS = 2**16
BUFFER_BYTES = 2**20
"""Bytes read from a Parquet file at once; bounds memory for large row groups."""

MAX_FACTOR = 2
"""How much larger than wanted a batch may become by texts that a dictionary holds once."""

D = TypeVar("D")
Columns = str | tuple[str, ...] | None
"""One column, some columns, or all."""
Convert = Callable[[pa.RecordBatch, Callable[[int], str], int, BadDocuments], list[D]]
"""Function that returns the documents in a batch of rows.

Its other arguments are a function that returns the location of a row of the row group, the number
of the batch's first row, and the record of rows that hold no document."""


def read_span(
    path: Path,
    span: Span,
    column: Columns,
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
            wanted = max(1, rows * size // max(span.text_bytes, 1))
            for group in groups:
                at_once = rows_at_once(path, file, group, column, wanted, MAX_FACTOR * size)
                yield from _row_group(file, path, group, column, at_once, convert, bad)
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
        lost = path.stat().st_size
        bad.add(lambda: str(path), f"cannot be read: {error}", lost_bytes=lost)


def _row_group(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    column: Columns,
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


def rows_at_once(
    path: Path, file: pq.ParquetFile, group: int, column: Columns, wanted: int, most: int
) -> int:
    """Return `wanted`, or the number of rows that certainly have at most `most` bytes, at least 1.

    A dictionary holds a text once for all rows that have it, so a file of 401 bytes may contain 2
    GB of text. The longest text of each dictionary is looked up where that matters.
    """
    rows = file.metadata.row_group(group)
    columns = _names(column)
    chunks = [
        chunk
        for chunk in map(rows.column, range(rows.num_columns))
        if columns is None or chunk.path_in_schema.split(".")[0] in columns
    ]
    bytes_per_row = sum(c.total_uncompressed_size * c.num_values for c in chunks) / max(
        rows.num_rows, 1
    )
    if min(wanted, rows.num_rows) * bytes_per_row > most:
        longest = _longest_texts(path, group, chunks)
        values = (c.num_values * long for c, long in zip(chunks, longest, strict=True))
        bytes_per_row = sum(values) / rows.num_rows
    return max(1, min(wanted, MAX_ROWS, int(most / max(bytes_per_row, 1))))


def _longest_texts(path: Path, group: int, chunks: list[pq.ColumnChunkMetaData]) -> list[float]:
    """Return about how long a value of each column of a row group may be, in bytes."""
    found = [c.total_uncompressed_size / max(c.num_values, 1) for c in chunks]
    for i, chunk in enumerate(chunks):
        if "DELTA_BYTE_ARRAY" in chunk.encodings:  # a text shares its start with the one before
            found[i] = chunk.total_uncompressed_size
        if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page:
            continue
        name = chunk.path_in_schema
        with pq.ParquetFile(path, read_dictionary=[name], pre_buffer=False) as file:
            reader = file.iter_batches(1, row_groups=[group], columns=[name], use_threads=False)
            batch = next(reader, None)
        values = None if batch is None else batch.column(0)
        while values is not None and not pa.types.is_dictionary(values.type):
            is_struct = pa.types.is_struct(values.type)
            # The elements of lists; None for another type, such as of maps.
            values = values.field(0) if is_struct else getattr(values, "values", None)
        if values is not None and len(values.dictionary):
            sizes = np.diff(np.frombuffer(values.dictionary.buffers()[1], np.int32))
            found[i] += float(sizes.max(initial=0))
    return found


def _names(column: Columns) -> list[str] | None:
    if isinstance(column, str):
        return [column]
    return None if column is None else list(column)


def _batches(
    file: pq.ParquetFile, group: int, column: Columns, rows: int
) -> Iterator[pa.RecordBatch]:
    columns = _names(column)
    found: Iterator[pa.RecordBatch] = file.iter_batches(
        rows, row_groups=[group], columns=columns, use_threads=False
    )
    return found


def _row(path: Path, group: int, row: int) -> str:
    """Return `file, row N`, with N counted from the start of the file."""
    footer = pq.read_metadata(path)
    before = sum(footer.row_group(earlier).num_rows for earlier in range(group))
    return f"{path}, row {before + row}"


def text_chunks(
    path: Path, column: str | None, groups: slice = slice(None)
) -> list[list[pq.ColumnChunkMetaData]]:
    """Return the chunks of `column` in each of the row groups `groups` of a Parquet file.

    If `column` is None, returns those of all columns, of which conversations consist. Reads only
    the footer. Raises OSError or ArrowException if the footer cannot be read.
    """
    footer = pq.read_metadata(path)
    return [
        [
            chunk
            for chunk in map(group.column, range(group.num_columns))
            if column is None or chunk.path_in_schema == column
        ]
        for group in map(footer.row_group, range(footer.num_row_groups)[groups])
    ]


def is_text(kind: pa.DataType) -> bool:
    """Return True if a Parquet column of this type contains text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _kind(column: pa.DataType) -> str:
    if is_text(column):
        return TEXT
    return NOTHING if pa.types.is_null(column) else str(column)


def parquet_columns(path: Path, wanted: str | None) -> Kinds:
    """Return the columns of the schema; raise ConfigError if two have one name."""
    schema = pq.read_schema(path)
    check_names(path, schema.names)
    return {field.name: _kind(field.type) for field in schema}


def header(path: Path) -> list[str]:
    """Return the names of the columns of the schema."""
    return list(pq.read_schema(path).names)


def first_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield rows from the start of the first row group, FIRST_ROWS at most."""
    with pq.ParquetFile(path, pre_buffer=False) as file:
        if file.metadata.num_row_groups:
            few = rows_at_once(path, file, 0, tuple(columns), FIRST_ROWS, 2**24)
            batches = file.iter_batches(few, row_groups=[0], columns=columns)
            yield from next(batches).to_pylist()
