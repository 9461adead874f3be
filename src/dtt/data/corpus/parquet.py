"""Reading of row groups of Parquet files, in batches of rows and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.streams import NOTHING, TEXT, Kinds, Span, check_names

MAX_ROWS = 2**16
BUFFER_BYTES = 2**20
"""Bytes read from a Parquet file at once; bounds memory for large row groups."""
MAX_FACTOR = 2
"""How much larger than wanted a batch may become by texts that a dictionary holds once."""

Columns = Sequence[str] | None
"""Names of columns, the one with the text first; None: all of them."""
Batch = tuple[pa.RecordBatch, Callable[[int], str]]
"""Some rows, and a function that returns the location of each by its number in the batch."""


def read_span(
    path: Path, span: Span, columns: Columns, bad: BadDocuments, size: int
) -> Iterator[Batch]:
    """Yield the rows of row groups `span`, in batches of about `size` bytes."""
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            groups = range(span.start, span.stop)
            rows = sum(file.metadata.row_group(group).num_rows for group in groups)
            wanted = max(1, rows * size // max(span.text_bytes, 1))
            for group in groups:
                at_once = rows_at_once(path, file, group, columns, wanted, MAX_FACTOR * size)
                yield from _row_group(file, path, group, columns, at_once, bad)
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
        lost = path.stat().st_size
        bad.add(lambda: str(path), f"cannot be read: {error}", lost_bytes=lost)


def _row_group(
    file: pq.ParquetFile, path: Path, group: int, columns: Columns, at_once: int, bad: BadDocuments
) -> Iterator[Batch]:
    row = 0

    def read(count: int) -> Iterator[pa.RecordBatch]:
        names = None if columns is None else list(columns)
        found: Iterator[pa.RecordBatch] = file.iter_batches(
            count, row_groups=[group], columns=names, use_threads=False
        )
        return found

    try:
        for rows in read(at_once):
            yield rows, partial(_row, path, group, row)
            row += len(rows)
        return
    except Exception as error:  # noqa: BLE001
        raise_if_refused(error)
    try:  # read the failed batch again row by row, to keep the rows before the damage
        for rows in islice(read(1), row, None):
            yield rows, partial(_row, path, group, row)
            row += 1
    except Exception as error:  # noqa: BLE001
        raise_if_refused(error)
        count = file.metadata.row_group(group).num_rows
        why = f"the rest of row group {group}, {count - row} rows, cannot be read: {error}"
        (chunks,) = text_chunks(path, columns[0] if columns else None, slice(group, group + 1))
        lost = sum(chunk.total_compressed_size for chunk in chunks) * (count - row) // count
        bad.add(partial(_row, path, group, row, 0), why, lost_bytes=lost, count=count - row)


def rows_at_once(
    path: Path, file: pq.ParquetFile, group: int, columns: Columns, wanted: int, most: int
) -> int:
    """Return `wanted`, or the number of rows that certainly have at most `most` bytes, at least 1.

    A dictionary holds a text once for all rows that have it, so a file of 401 bytes may contain 2
    GB of text. The longest text of each dictionary is looked up where that matters.
    """
    rows = file.metadata.row_group(group)
    chunks = [
        chunk
        for chunk in map(rows.column, range(rows.num_columns))
        if columns is None or chunk.path_in_schema.split(".")[0] in columns
    ]
    bytes_per_row = sum(c.total_uncompressed_size * c.num_values for c in chunks) / max(
        rows.num_rows, 1
    )
    if min(wanted, rows.num_rows) * bytes_per_row > most:
        values = (c.num_values * _longest_text(path, group, c) for c in chunks)
        bytes_per_row = sum(values) / rows.num_rows
    return max(1, min(wanted, MAX_ROWS, int(most / max(bytes_per_row, 1))))


def _longest_text(path: Path, group: int, chunk: pq.ColumnChunkMetaData) -> float:
    """Return about how long a value of a column of a row group may be, in bytes."""
    longest: float = chunk.total_uncompressed_size / max(chunk.num_values, 1)
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # a text shares its start with the one before
        longest = chunk.total_uncompressed_size
    if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page:
        return longest
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
        longest += float(sizes.max(initial=0))
    return longest


def _row(path: Path, group: int, first: int, row: int) -> str:
    """Return `file, row N`, with N counted from the start of the file."""
    footer = pq.read_metadata(path)
    before = sum(footer.row_group(earlier).num_rows for earlier in range(group))
    return f"{path}, row {before + first + row}"


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


def parquet_columns(path: Path, wanted: str | None) -> Kinds:
    """Return the columns of the schema; raise ConfigError if two have one name."""
    schema = pq.read_schema(path)
    check_names(path, schema.names)
    kinds: Kinds = {}
    for field in schema:
        other = NOTHING if pa.types.is_null(field.type) else str(field.type)
        kinds[field.name] = TEXT if is_text(field.type) else other
    return kinds


def header(path: Path) -> list[str]:
    """Return the names of the columns of the schema."""
    return list(pq.read_schema(path).names)
