"""Reading of documents together with other columns of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from dtt.base.errors import DamagedError, InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.documents import (
    BATCH_BYTES,
    batch_documents,
    batches,
    column_documents,
    is_sound,
)
from dtt.data.corpus.formats import FORMATS, read_rows_of
from dtt.data.corpus.parquet import read_span
from dtt.data.corpus.streams import UNREADABLE, Span
from dtt.data.corpus.text_columns import column_names
from dtt.data.corpus.units import Corpus, Unit


def check_columns(corpus: Corpus, columns: Sequence[str]) -> None:
    """Raise InputError, with the columns there are, if the corpus lacks one of `columns`.

    Looks at the first file only: `read_with_columns` checks each Parquet and CSV file, while JSON
    rows may lack a key.
    """
    if columns:
        path = corpus.path(0)
        _require(columns, column_names(path), path)


Row = tuple[bytes, dict[str, Any]]
"""A document and other columns of its row."""


def read_with_columns(
    corpus: Corpus, unit: Unit, columns: Sequence[str], bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[Row]]:
    """Iterate over the documents that `read_batches` yields, each with `columns` of its row.

    A key that a JSON row lacks is not in the result. Raises InputError if a Parquet or CSV file
    lacks a column, or if the documents are not rows; DamagedError for a damaged file, because a
    row that cannot be read here may have a readable text, and documents are numbered.
    """
    for span in unit.spans:
        path, manifest = corpus.path(span.file), corpus.manifest
        column = str(manifest.text_column)
        lost = bad.lost_bytes
        form = FORMATS[manifest.file_format]
        if form.header is not None and span.stop:
            try:
                _require(columns, form.header(path), path)
            except UNREADABLE as error:  # the reader reports it
                raise_if_refused(error)
        if form.has_row_groups:
            wanted = tuple(dict.fromkeys((column, *columns)))
            convert = partial(_rows_with, column, columns)
            yield from read_span(path, span, wanted, convert, bad, size)
        elif form.rows is None:
            raise _no_columns(columns, (), path)
        else:
            found = _chosen(corpus, span, columns, bad)
            yield from batches(found, size, lambda row: len(row[0]))
        if bad.lost_bytes > lost:
            raise DamagedError(
                "a file of the corpus is damaged",
                where=bad.examples[-1] if bad.examples else path,
                why=f"documents are chosen by {', '.join(columns)}, which cannot be read there",
                next="fetch or write the file again",
            )


def _chosen(corpus: Corpus, span: Span, columns: Sequence[str], bad: BadDocuments) -> Iterator[Row]:
    """Yield the documents of a span of rows, each with columns of its row."""
    manifest = corpus.manifest
    for row in read_rows_of(manifest.file_format, corpus.path(span.file), span, bad):
        chosen = {name: row[2][name] for name in columns if name in row[2]}
        for document in column_documents([row], manifest, bad):
            yield document, chosen


def _rows_with(
    column: str,
    columns: Sequence[str],
    rows: pa.RecordBatch,
    where: Callable[[int], str],
    first: int,
    bad: BadDocuments,
) -> list[Row]:
    texts = rows.select([column])
    values = _values(rows.select(list(columns)), where, first, bad)
    if is_sound(texts.column(0)):
        return list(zip(batch_documents(texts, where, first, bad), values, strict=True))
    return [
        (document, value)
        for place, value in enumerate(values)
        for document in batch_documents(texts.slice(place, 1), where, first + place, bad)
    ]


def _values(
    rows: pa.RecordBatch, where: Callable[[int], str], first: int, bad: BadDocuments
) -> list[dict[str, Any]]:
    """Return the values of each row; a value that cannot be read is None, and recorded in `bad`.

    The row stays, since its text can be read and documents are numbered.
    """
    try:
        return list(rows.to_pylist())
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
    found: list[dict[str, Any]] = [dict.fromkeys(rows.schema.names) for _ in range(len(rows))]
    for name in rows.schema.names:
        for place, cell in enumerate(rows.column(name)):
            with bad.guard(partial(where, first + place)):
                found[place][name] = cell.as_py()
    return found


def _require(columns: Sequence[str], names: Sequence[str], path: Path) -> None:
    if not set(columns) <= set(names):
        raise _no_columns(columns, names, path)


def _no_columns(columns: Sequence[str], names: Sequence[str], path: Path) -> InputError:
    missing = ", ".join(sorted(set(columns) - set(names)))
    return InputError(
        f"there is no column {missing}",
        where=path,
        why=f"columns: {', '.join(names) or 'none, as the documents are plain text'}",
        next="choose another column in clean.where",
    )
