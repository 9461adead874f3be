"""Readers that stream the documents and rows of a corpus, in file order and in bounded memory.

Both come from the same units of work: row groups of Parquet files, byte ranges of lines, and entire
files. A document is a text as UTF-8; conversations are read as complete rows, as JSON objects.
Those that cannot be read are skipped and recorded in a BadDocuments, with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import DamagedError, InputError
from dtt.data.corpus.bad_documents import SURROGATE, BadDocuments, raise_if_refused
from dtt.data.corpus.formats import FORMATS, read_rows_of
from dtt.data.corpus.parquet import is_text, read_span
from dtt.data.corpus.streams import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    UNREADABLE,
    Span,
    Where,
    lost_bytes,
    open_stream,
    raw_lines,
)
from dtt.data.corpus.text_columns import column_names
from dtt.data.corpus.units import Corpus, Unit

SECTION_BYTES = 4096
"""Approximate size of a section, where documents are sections (runs of paragraphs)."""
BATCH_BYTES = 2**21
"""Default size of a batch of documents: about what the processor's cache holds."""
ROW_BATCH_BYTES = 2**18
"""Size of a batch of Parquet rows. As Python objects they take about ten times the memory."""
T = TypeVar("T")
Row = tuple[bytes, dict[str, Any]]
"""A document and other columns of its row."""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One row of a corpus."""

    where: Where
    """Function that returns its location, `file:line`. It may be slow."""
    content: bytes
    """The JSON text, UTF-8; a hash of it decides whether the row is held out."""
    value: dict[str, Any]


def read_unit(
    corpus: Corpus, unit: Unit, bad: BadDocuments, at_once: int = BATCH_BYTES
) -> Iterator[bytes]:
    """Iterate over the readable documents of `unit`, empty ones included, in file order.

    Those that the selection of the corpus removes are left out. Documents are read and decoded in
    batches of about `at_once` bytes.
    """
    return chain.from_iterable(read_batches(corpus, unit, bad, at_once))


def read_batches(
    corpus: Corpus, unit: Unit, bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[bytes]]:
    """Iterate over the documents of `read_unit`, in lists of about `size` bytes."""
    found = _document_batches(corpus, unit, bad, size)
    return found if corpus.selection is None else corpus.selection.keep(unit.index, found)


def _document_batches(
    corpus: Corpus, unit: Unit, bad: BadDocuments, size: int
) -> Iterator[list[bytes]]:
    manifest = corpus.manifest
    if manifest.has_rows:
        raise InputError(
            "the corpus contains conversations, not text",
            where=corpus.folder,
            why="it was downloaded with data.type=chat",
            next="set data.type=chat here, too, or run dtt download again without it",
        )
    form = FORMATS[manifest.file_format]
    for span in unit.spans:
        path = corpus.path(span.file)
        if form.has_row_groups:
            for rows, where in read_span(path, span, [str(manifest.text_column)], bad, size):
                texts = _column_texts(rows.column(0), where, bad)
                yield [text for text in texts if text is not None]
        elif form.rows is not None:
            yield from batches((text for text, _ in _texts(corpus, span, bad)), size)
        else:
            yield from batches(_plain_text(path, span, manifest.txt_documents, bad), size)


def read_with_columns(
    corpus: Corpus, unit: Unit, columns: Sequence[str], bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[Row]]:
    """Iterate over the documents that `read_batches` yields, each with `columns` of its row.

    A key that a JSON row lacks is not in the result. If a value cannot be read, all of the row's
    are None: the row stays, since its text can be read and documents are numbered. Raises
    InputError if a Parquet or CSV file lacks a column, or if the documents are not rows;
    DamagedError for a damaged file, because a row that cannot be read here may have a readable
    text.
    """
    column = str(corpus.manifest.text_column)
    form = FORMATS[corpus.manifest.file_format]
    for span in unit.spans:
        path, lost = corpus.path(span.file), bad.lost_bytes
        if form.header is not None and span.stop:
            try:
                _require(columns, form.header(path), path)
            except UNREADABLE as error:  # the reader reports it
                raise_if_refused(error)
        if form.has_row_groups:
            wanted = [*dict.fromkeys((column, *columns))]
            for rows, where in read_span(path, span, wanted, bad, size):
                texts = _column_texts(rows.column(column), where, bad)
                values = _values(rows.select(list(columns)), where, bad)
                none: dict[str, Any] = dict.fromkeys(columns)
                pairs = zip(texts, values, strict=True)
                yield [(text, value or none) for text, value in pairs if text is not None]
        elif form.rows is None:
            _require(columns, (), path)
        else:
            found = (
                (text, {name: row[name] for name in columns if name in row})
                for text, row in _texts(corpus, span, bad)
            )
            yield from batches(found, size, lambda row: len(row[0]))
        if bad.lost_bytes > lost:
            raise DamagedError(
                "a file of the corpus is damaged",
                where=bad.examples[-1] if bad.examples else path,
                why=f"documents are chosen by {', '.join(columns)}, which cannot be read there",
                next="fetch or write the file again",
            )


def check_columns(corpus: Corpus, columns: Sequence[str]) -> None:
    """Raise InputError, with the columns there are, if the corpus lacks one of `columns`.

    Looks at the first file only: `read_with_columns` checks each Parquet and CSV file, while JSON
    rows may lack a key.
    """
    if columns:
        path = corpus.path(0)
        _require(columns, column_names(path), path)


def _require(columns: Sequence[str], names: Sequence[str], path: Path) -> None:
    if missing := ", ".join(sorted(set(columns) - set(names))):
        raise InputError(
            f"there is no column {missing}",
            where=path,
            why=f"columns: {', '.join(names) or 'none, as the documents are plain text'}",
            next="choose another column in clean.where",
        )


def read_rows(corpus: Corpus, unit: Unit, bad: BadDocuments) -> Iterator[list[JsonRow]]:
    """Iterate over the readable rows of `unit` in file order, in lists of bounded size.

    Those that the selection of the corpus removes are left out. Raises InputError if the corpus was
    downloaded as text.
    """
    found = _row_batches(corpus, unit, bad)
    return found if corpus.selection is None else corpus.selection.keep(unit.index, found)


def _row_batches(corpus: Corpus, unit: Unit, bad: BadDocuments) -> Iterator[list[JsonRow]]:
    if not corpus.manifest.has_rows:
        raise InputError(
            "the corpus contains text, not conversations",
            where=corpus.folder,
            why="it was downloaded without data.type=chat",
            next="run dtt download again with data.type=chat",
        )
    for span in unit.spans:
        if FORMATS[corpus.manifest.file_format].has_row_groups:
            path = corpus.path(span.file)
            for rows, where in read_span(path, span, None, bad, ROW_BATCH_BYTES):
                located = enumerate(_values(rows, where, bad))
                found = (
                    _json_row(without_nulls(value), partial(where, number), bad)
                    for number, value in located
                    if value is not None
                )
                yield [row for row in found if row is not None]
        else:
            rows = _line_rows(corpus, span, bad)
            yield from batches(rows, BATCH_BYTES, lambda row: len(row.content))


def _line_rows(corpus: Corpus, span: Span, bad: BadDocuments) -> Iterator[JsonRow]:
    """Yield the rows of a span; supports every format without row groups."""
    path = corpus.path(span.file)
    for where, text, value in read_rows_of(corpus.manifest.file_format, path, span, bad):
        # Only an escape sequence can yield a lone surrogate, as `text` is valid UTF-8.
        if text is not None and b"\\ud" not in text and b"\\uD" not in text:
            yield JsonRow(where, text.strip(), value)
        elif (row := _json_row(value, where, bad, is_json=text is not None)) is not None:
            yield row


def _json_row(
    value: dict[str, Any], where: Where, bad: BadDocuments, *, is_json: bool = False
) -> JsonRow | None:
    """Return a row without its own JSON text; None if it cannot be written as JSON.

    Lone surrogates of JSON are replaced; those of CSV stand for invalid bytes.
    """
    with bad.guard(where):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        if is_json and SURROGATE.search(text):
            text = bad.without_surrogates(text)
            value = json.loads(text)
        content = text.encode()
        if len(content) <= MAX_DOCUMENT_BYTES:
            return JsonRow(where, content, value)
        bad.add(where, TOO_LONG)
    return None


def without_nulls(value: Any) -> Any:
    """Return a value of a Parquet file without the keys of objects whose value is null.

    All structs of a column have the same keys there, so that the arguments of one tool would also
    have those of all others, as nulls. Nulls in lists are kept.
    """
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def batches(
    documents: Iterable[T],
    size: int,
    length: Callable[[T], int] = len,  # type: ignore[assignment]
) -> Iterator[list[T]]:
    """Group documents into lists of about `size` bytes; `length` returns the bytes of one."""
    batch: list[T] = []
    room = size
    for document in documents:
        batch.append(document)
        room -= length(document) + 1
        if room <= 0:
            yield batch
            batch, room = [], size
    if batch:
        yield batch


def _values(
    rows: pa.RecordBatch, where: Callable[[int], str], bad: BadDocuments
) -> list[dict[str, Any] | None]:
    """Return each row, or None for one with a value that Python cannot hold."""
    try:
        return list(rows.to_pylist())
    except Exception as error:  # noqa: BLE001  one row at a time, to keep the others
        raise_if_refused(error)
    found: list[dict[str, Any] | None] = [None] * len(rows)
    for number in range(len(rows)):
        with bad.guard(partial(where, number)):
            (found[number],) = rows.slice(number, 1).to_pylist()
    return found


def _column_texts(
    texts: pa.Array, where: Callable[[int], str], bad: BadDocuments
) -> list[bytes | None]:
    """Return the text of each row, or None for one that is no document."""
    if is_sound(texts):
        binary = pa.binary()  # `view` where possible: `cast` loads all of pyarrow.compute
        plain = pa.types.is_string(texts.type)
        return list((texts.view(binary) if plain else texts.cast(binary)).to_pylist())
    found: list[bytes | None] = [None] * len(texts)
    for number, value in enumerate(texts):
        place = partial(where, number)
        with bad.guard(place):
            found[number] = _encoded(value.as_py(), place, bad)
    return found


def is_sound(texts: pa.Array) -> bool:
    """Return True if all values are documents.

    A string column of a Parquet file may contain bytes that are not UTF-8, hence the validation.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return is_text(texts.type) and not texts.null_count and texts.nbytes <= MAX_DOCUMENT_BYTES


def _texts(corpus: Corpus, span: Span, bad: BadDocuments) -> Iterator[Row]:
    """Yield the documents of a span of rows, each with its row; not of Parquet."""
    manifest: CorpusManifest = corpus.manifest
    column = str(manifest.text_column)
    path = corpus.path(span.file)
    for where, content, row in read_rows_of(manifest.file_format, path, span, bad):
        if column not in row:
            bad.add(where, f"no {FORMATS[manifest.file_format].field} {column!r}")
            continue
        text = _encoded(row[column], where, bad, is_json=content is not None)
        if text is not None:
            yield text, row


def _encoded(
    value: object, where: Where, bad: BadDocuments, *, is_json: bool = False
) -> bytes | None:
    """Return `value` as UTF-8; None, and a record in `bad`, if it is no document.

    A lone surrogate stands for an invalid byte (see `CsvFile`) unless `is_json` is set; then it
    was written as such, and is replaced.
    """
    if not isinstance(value, str):
        bad.add(where, f"the text is {'null' if value is None else type(value).__name__}")
        return None
    try:
        content = value.encode()
    except UnicodeEncodeError as error:
        if not is_json:
            bad.add(where, f"not UTF-8: invalid byte at character {error.start}")
            return None
        content = bad.without_surrogates(value).encode()
    if len(content) > MAX_DOCUMENT_BYTES:
        bad.add(where, TOO_LONG)
        return None
    return content


def _plain_text(
    path: Path, span: Span, documents: str | None, bad: BadDocuments
) -> Iterator[bytes]:
    """Yield the documents of a span of a text file: the whole file, its lines or its sections."""
    pieces = {"file": _whole, "line": raw_lines, "section": _sections}
    if span.stop == 0 and documents != "file":
        bad.add(lambda: f"{path}:1", "the file is empty")
        return
    for where, content in pieces[documents or "file"](path, span, bad):
        text = content.rstrip(b"\r\n") if documents == "line" else content
        if documents == "line" and not text:
            continue
        try:
            text.decode()
        except UnicodeDecodeError as error:
            bad.add(where, f"not UTF-8: byte {error.start} is 0x{text[error.start]:02x}")
        else:
            yield text


def _sections(path: Path, span: Span, bad: BadDocuments) -> Iterator[tuple[Where, bytes]]:
    """Yield sections: runs of complete paragraphs, about SECTION_BYTES each.

    Concatenated, they are the unchanged text. A section ends at the first blank line after
    SECTION_BYTES, or at any line end after twice that size.
    """
    section: list[bytes] = []
    size = 0
    start: Where | None = None
    for where, line in raw_lines(path, span, bad):
        section.append(line)
        start = start or where
        size += len(line)
        if size >= (SECTION_BYTES if line.isspace() else 2 * SECTION_BYTES):
            yield start, b"".join(section)
            section, size, start = [], 0, None
    if start is not None:
        yield start, b"".join(section)


def _whole(path: Path, span: Span, bad: BadDocuments) -> Iterator[tuple[Where, bytes]]:
    def where() -> str:
        return f"{path}:1"

    stream = None
    try:
        with open_stream(path) as stream:
            content = stream.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise_if_refused(error)
        bad.add(where, f"cannot be read: {error}", lost_bytes=lost_bytes(stream, 0, span.stop))
        return
    if len(content) > MAX_DOCUMENT_BYTES:
        bad.add(where, TOO_LONG)
    else:
        yield where, content.removeprefix(BYTE_ORDER_MARK)
