"""Readers that stream the documents of a corpus as UTF-8, in bounded memory.

Documents that cannot be read are skipped and recorded in a BadDocuments, with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.compressed import lost_bytes
from dtt.data.corpus.csv_rows import csv_rows
from dtt.data.corpus.formats import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    is_compressed,
    is_text,
    open_stream,
    read_line,
    starts_with_array,
)
from dtt.data.corpus.json_array import elements
from dtt.data.corpus.line_numbers import location
from dtt.data.corpus.parquet import read_span
from dtt.data.corpus.units import Corpus, Span, Unit

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
        if corpus.manifest.file_format == "parquet":
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
    """Yield the documents of a span; supports every format except Parquet."""
    path, manifest = corpus.path(span.file), corpus.manifest
    if span.stop == 0 and manifest.txt_documents != "file":
        bad.add(partial(location, path, 0, 1), "the file is empty")
        return
    match manifest.file_format:
        case "csv":
            yield from column_documents(csv_rows(path, bad), "column", manifest, bad)
        case "jsonl":
            rows = ((where, row) for where, _, row in json_objects(path, span, bad))
            yield from column_documents(rows, "key", manifest, bad)
        case "txt":
            pieces = {"file": _whole, "line": _text_lines, "section": _sections}
            for where, content in pieces[manifest.txt_documents or "file"](path, span, bad):
                yield from _utf8(content, where, bad)


Located = tuple[Callable[[], str], bytes]
"""A function that returns the `file:line` of some content, and the content."""


def raw_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    """Yield the lines that start in the span, with their line ends.

    A compressed file is read to its end.
    """
    position = span.start
    number = 0
    stream = None
    try:
        with open_stream(path) as stream:
            if position:
                stream.seek(position - 1)
                position += _skip_line(stream, span.stop - position + 1) - 1
            while position < span.stop or is_compressed(path):
                line, size = read_line(stream)
                if not size:
                    if not is_compressed(path):
                        raise OSError("it has become shorter")
                    return
                number += 1
                where = partial(location, path, span.start, number)
                if position == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                position += size
                if size > MAX_DOCUMENT_BYTES:
                    bad.add(where, TOO_LONG)
                else:
                    yield where, line
    except OSError as error:
        raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        lost = lost_bytes(stream, position, span.stop)
        bad.add(partial(location, path, span.start, number + 1), why, lost_bytes=lost)


def _skip_line(stream: BinaryIO, most: int) -> int:
    """Skip the rest of the current line, `most` bytes at most; return the number of bytes."""
    skipped = 0
    while skipped < most and (part := stream.readline(min(most - skipped, 2**20))):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


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


def json_objects(
    path: Path, span: Span, bad: BadDocuments
) -> Iterator[tuple[Callable[[], str], bytes, dict[str, Any]]]:
    """Yield the location, the bytes and the content of each line that is a JSON object.

    Other lines are recorded in `bad`, except for blank ones. If the file is a JSON array, its
    elements take the place of lines.
    """
    if span.start == 0 and starts_with_array(path):
        yield from _array_objects(path, span, bad)
        return
    for where, line in raw_lines(path, span, bad):
        if line.isspace():
            continue
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            bad.add(where, f"not UTF-8: byte {error.start} is 0x{line[error.start]:02x}")
        except ValueError as error:
            bad.add(where, f"not JSON: {error}")
        except RecursionError:
            bad.add(where, "invalid JSON: nested too deeply")
        else:
            if isinstance(value, dict):
                yield where, line, value
            else:
                bad.add(where, "not a JSON object")


def _array_objects(
    path: Path, span: Span, bad: BadDocuments
) -> Iterator[tuple[Callable[[], str], bytes, dict[str, Any]]]:
    stream, line, used = None, 1, 0
    try:
        with open_stream(path) as stream:
            for line, text, value in elements(stream, MAX_DOCUMENT_BYTES):
                where = partial("{}:{}".format, path, line)
                content = text.encode(errors="surrogatepass")
                used += len(content)
                if isinstance(value, dict):
                    yield where, content, value
                else:
                    bad.add(where, "not a JSON object")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        bad.add(partial("{}:{}".format, path, line), why, lost_bytes=max(span.stop - used, 1))


def column_documents(
    rows: Iterable[tuple[Callable[[], str], dict[Any, Any]]],
    noun: str,
    manifest: CorpusManifest,
    bad: BadDocuments,
) -> Iterator[bytes]:
    """Yield the texts of `rows`; `noun` is `key` for rows of JSON, `column` for others."""
    for where, row in rows:
        if manifest.text_column not in row:
            bad.add(where, f"no {noun} {manifest.text_column!r}")
        else:
            yield from _encoded(row[manifest.text_column], where, bad, is_json=noun == "key")


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
