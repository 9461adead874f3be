"""Readers of complete rows of a corpus as JSON objects, for conversations.

Rows come from the same units of work as documents: byte ranges of JSON lines, row groups of Parquet
files, and complete CSV files. Rows that cannot be read are recorded in a BadDocuments, with file
and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import SURROGATE, BadDocuments, raise_if_refused
from dtt.data.corpus.documents import BATCH_BYTES, batches
from dtt.data.corpus.formats import FORMATS, read_rows_of
from dtt.data.corpus.parquet import read_span
from dtt.data.corpus.streams import MAX_DOCUMENT_BYTES, TOO_LONG, Span
from dtt.data.corpus.units import Corpus, Unit

PARQUET_BATCH_BYTES = 2**18
"""Size of a batch of Parquet rows. As Python objects they take about ten times the memory."""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One row of a corpus."""

    where: Callable[[], str]
    """Function that returns its location, `file:line`. It may be slow."""
    content: bytes
    """The JSON text, UTF-8; a hash of it decides whether the row is held out."""
    value: dict[str, Any]


def read_rows(
    corpus: Corpus, unit: Unit, bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[JsonRow]]:
    """Iterate over the readable rows of `unit` in file order, in lists of about `size` bytes.

    Those that the selection of the corpus removes are left out. Raises InputError if the corpus was
    downloaded as text.
    """
    found = _batches(corpus, unit, bad, size)
    return found if corpus.selection is None else corpus.selection.keep(unit.index, found)


def _batches(corpus: Corpus, unit: Unit, bad: BadDocuments, size: int) -> Iterator[list[JsonRow]]:
    if not corpus.manifest.has_rows:
        raise InputError(
            "the corpus contains text, not conversations",
            where=corpus.folder,
            why="it was downloaded without data.type=chat",
            next="run dtt download again with data.type=chat",
        )
    for span in unit.spans:
        path = corpus.path(span.file)
        if FORMATS[corpus.manifest.file_format].has_row_groups:
            most = min(size, PARQUET_BATCH_BYTES)
            yield from read_span(path, span, None, _rows_of, bad, most)
        else:
            yield from batches(_line_rows(corpus, span, bad), size, lambda row: len(row.content))


def _line_rows(corpus: Corpus, span: Span, bad: BadDocuments) -> Iterator[JsonRow]:
    """Yield the rows of a span; supports every format without row groups."""
    path = corpus.path(span.file)
    for where, text, value in read_rows_of(corpus.manifest.file_format, path, span, bad):
        # Only an escape sequence can yield a lone surrogate, as `text` is valid UTF-8.
        if text is None or b"\\ud" in text or b"\\uD" in text:
            yield from _row(value, where, bad, is_json=text is not None)
        else:
            yield JsonRow(where, text.strip(), value)


def _row(
    value: dict[str, Any], where: Callable[[], str], bad: BadDocuments, *, is_json: bool = False
) -> Iterator[JsonRow]:
    """Yield a row without its own JSON text; record it in `bad` if it cannot be written as JSON.

    Lone surrogates of JSON are replaced; those of CSV stand for invalid bytes.
    """
    with bad.guard(where):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        if is_json and SURROGATE.search(text):
            text = bad.without_surrogates(text)
            value = json.loads(text)
        content = text.encode()
        if len(content) > MAX_DOCUMENT_BYTES:
            bad.add(where, TOO_LONG)
        else:
            yield JsonRow(where, content, value)


def _rows_of(
    rows: pa.RecordBatch, where: Callable[[int], str], first: int, bad: BadDocuments
) -> list[JsonRow]:
    """Return the readable rows of a batch of Parquet rows; `first` is the number of `rows[0]`."""
    try:
        values = rows.to_pylist()
    except Exception as error:  # noqa: BLE001  one row at a time, to keep the others
        raise_if_refused(error)
        return [
            row
            for number in range(len(rows))
            for row in _parquet_row(rows.slice(number, 1), partial(where, first + number), bad)
        ]
    return [
        row
        for number, value in enumerate(values, first)
        for row in _row(without_nulls(value), partial(where, number), bad)
    ]


def _parquet_row(
    row: pa.RecordBatch, where: Callable[[], str], bad: BadDocuments
) -> Iterator[JsonRow]:
    with bad.guard(where):
        (value,) = row.to_pylist()
        yield from _row(without_nulls(value), where, bad)


def without_nulls(value: Any) -> Any:
    """Return a value of a Parquet file without the keys of objects whose value is null.

    All structs of a column have the same keys there, so that the arguments of one tool would also
    have those of all others, as nulls. Nulls in lists are kept.
    """
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
