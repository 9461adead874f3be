"""Readers that stream the documents of a corpus as UTF-8, in bounded memory.

Documents that cannot be read are skipped and recorded in a BadDocuments, with file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.compressed import lost_bytes
from dtt.data.corpus.formats import FORMATS, read_rows_of
from dtt.data.corpus.line_numbers import location
from dtt.data.corpus.parquet import is_text, read_span
from dtt.data.corpus.streams import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    Located,
    LocatedRow,
    Span,
    open_stream,
    raw_lines,
)
from dtt.data.corpus.units import Corpus, Unit

SECTION_BYTES = 4096
"""Approximate size of a section, where documents are sections (runs of paragraphs)."""
BATCH_BYTES = 2**21
"""Default size of a batch of documents: about what the processor's cache holds."""
T = TypeVar("T")


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
    found = _batches(corpus, unit, bad, size)
    return found if corpus.selection is None else corpus.selection.keep(unit.index, found)


def _batches(corpus: Corpus, unit: Unit, bad: BadDocuments, size: int) -> Iterator[list[bytes]]:
    if corpus.manifest.has_rows:
        raise InputError(
            "the corpus contains conversations, not text",
            where=corpus.folder,
            why="it was downloaded with data.type=chat",
            next="set data.type=chat here, too, or run dtt download again without it",
        )
    for span in unit.spans:
        if FORMATS[corpus.manifest.file_format].has_row_groups:
            column = str(corpus.manifest.text_column)
            yield from read_span(corpus.path(span.file), span, column, batch_documents, bad, size)
        else:
            yield from batches(_documents(corpus, span, bad), size)


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


def _documents(corpus: Corpus, span: Span, bad: BadDocuments) -> Iterator[bytes]:
    """Yield the documents of a span; supports every format without row groups."""
    path, manifest = corpus.path(span.file), corpus.manifest
    if FORMATS[manifest.file_format].rows is not None:
        rows = read_rows_of(manifest.file_format, path, span, bad)
        yield from column_documents(rows, manifest, bad)
        return
    pieces = {"file": _whole, "line": _text_lines, "section": _sections}
    if span.stop == 0 and manifest.txt_documents != "file":
        bad.add(partial(location, path, 0, 1), "the file is empty")
        return
    for where, content in pieces[manifest.txt_documents or "file"](path, span, bad):
        yield from _utf8(content, where, bad)


def _text_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    for where, line in raw_lines(path, span, bad):
        content = line.rstrip(b"\r\n")
        if content:
            yield where, content


def _sections(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    """Yield sections: runs of complete paragraphs, about SECTION_BYTES each.

    Concatenated, they are the unchanged text. A section ends at the first blank line after
    SECTION_BYTES, or at any line end after twice that size.
    """
    section: list[bytes] = []
    size = 0
    start: Callable[[], str] | None = None
    for where, line in raw_lines(path, span, bad):
        section.append(line)
        start = start or where
        size += len(line)
        if size >= (SECTION_BYTES if line.isspace() else 2 * SECTION_BYTES):
            yield start, b"".join(section)
            section, size, start = [], 0, None
    if start is not None:
        yield start, b"".join(section)


def _whole(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
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


def _utf8(content: bytes, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    """Yield `content` if it is valid UTF-8; record it in `bad` otherwise."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        bad.add(where, f"not UTF-8: byte {error.start} is 0x{content[error.start]:02x}")
    else:
        yield content


def column_documents(
    rows: Iterable[LocatedRow], manifest: CorpusManifest, bad: BadDocuments
) -> Iterator[bytes]:
    """Yield the texts of `rows`."""
    for where, content, row in rows:
        if manifest.text_column not in row:
            noun = FORMATS[manifest.file_format].field
            bad.add(where, f"no {noun} {manifest.text_column!r}")
        else:
            is_json = content is not None
            yield from _encoded(row[manifest.text_column], where, bad, is_json=is_json)


def batch_documents(
    rows: pa.RecordBatch, where: Callable[[int], str], first: int, bad: BadDocuments
) -> list[bytes]:
    """Return the texts that are documents; `first` is the row of `rows[0]` in its row group."""
    texts = rows.column(0)
    if is_sound(texts):
        binary = pa.binary()  # `view` where possible: `cast` loads all of pyarrow.compute
        plain = pa.types.is_string(texts.type)
        found: list[bytes] = (texts.view(binary) if plain else texts.cast(binary)).to_pylist()
        return found
    return [
        document
        for number, value in enumerate(texts, first)
        for document in _value(value, partial(where, number), bad)
    ]


def is_sound(texts: pa.Array) -> bool:
    """Return True if all values are documents.

    A string column of a Parquet file may contain bytes that are not UTF-8, hence the validation.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return is_text(texts.type) and not texts.null_count and texts.nbytes <= MAX_DOCUMENT_BYTES


def _value(value: pa.Scalar, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    with bad.guard(where):
        yield from _encoded(value.as_py(), where, bad)


def _encoded(
    value: object, where: Callable[[], str], bad: BadDocuments, *, is_json: bool = False
) -> Iterator[bytes]:
    """Yield `value` as UTF-8 if it is a string that can be encoded; record it in `bad` otherwise.

    A lone surrogate stands for an invalid byte (see `open_csv`) unless `is_json` is set; then it
    was written as such, and is replaced. A string longer than MAX_DOCUMENT_BYTES is recorded too.
    """
    if not isinstance(value, str):
        bad.add(where, f"the text is {'null' if value is None else type(value).__name__}")
        return
    try:
        content = value.encode()
    except UnicodeEncodeError as error:
        if not is_json:
            bad.add(where, f"not UTF-8: invalid byte at character {error.start}")
            return
        content = bad.without_surrogates(value).encode()
    if len(content) > MAX_DOCUMENT_BYTES:
        bad.add(where, TOO_LONG)
    else:
        yield content
