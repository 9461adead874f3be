"""Readers that stream the documents of a corpus as UTF-8, in bounded memory.

Documents that cannot be read are skipped and recorded in a BadDocuments, with file and line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.data.compressed import lost_bytes
from dtt.data.corpus import Corpus, Span, Unit, text_chunks
from dtt.data.formats import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    UTF_16_MARKS,
    is_compressed,
    is_text,
    open_csv,
    open_stream,
)
from dtt.errors import DamagedError

SECTION_BYTES = 4096
"""Approximate size of a section, where documents are sections (runs of paragraphs)."""
BATCH_BYTES = 2**21
"""Default size of a batch of documents: about what the processor's cache holds."""
MAX_PARQUET_ROWS = 2**16
PARQUET_BUFFER_BYTES = 2**20
"""Bytes read from a Parquet file at once; bounds memory for large row groups."""
TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"


class BadDocuments:
    """A counter of unreadable documents that also keeps the locations of the first few."""

    def __init__(self, *, stop: bool = False, shown: int = 5) -> None:
        """Keep the locations of the first `shown` documents.

        With `stop`, the first unreadable document raises DamagedError.
        """
        self.count = self.lost_bytes = 0
        self.examples: list[str] = []
        self._stop, self._shown = stop, shown

    def add(
        self, where: Callable[[], str], why: str, *, lost_bytes: int = 0, count: int = 1
    ) -> None:
        """Record an unreadable document; raise DamagedError if `stop` was set.

        `where` returns the location. It may be slow, so it is called only for documents that are
        shown. If the rest of a damaged file is lost too, `lost_bytes` is its approximate size, and
        `count` the number of lost documents, if known.
        """
        self.count += count
        self.lost_bytes += lost_bytes
        why = " ".join("".join(c if c.isprintable() else " " for c in why).split())
        if lost_bytes:
            why += f"; lost: about {lost_bytes:,} bytes"
        if self._stop:
            raise DamagedError(
                "a document cannot be read",
                where=where(),
                why=why,
                next="mend it, or leave such documents out: tokenize.on_bad_document=skip",
            )
        if len(self.examples) < self._shown:
            self.examples.append(f"{where()}: {why}")


def read_unit(
    corpus: Corpus, unit: Unit, bad: BadDocuments, at_once: int = BATCH_BYTES
) -> Iterator[bytes]:
    """Iterate over the readable documents of `unit`, empty ones included, in file order.

    Documents are read and decoded in batches of about `at_once` bytes.
    """
    return chain.from_iterable(read_batches(corpus, unit, bad, at_once))


def read_batches(
    corpus: Corpus, unit: Unit, bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[bytes]]:
    """Iterate over the readable documents of `unit`, in lists of about `size` bytes."""
    for span in unit.spans:
        if corpus.manifest.file_format == "parquet":
            column = str(corpus.manifest.text_column)
            yield from _parquet(corpus.path(span.file), span, column, bad, size)
        else:
            yield from batches(_documents(corpus, span, bad), size)


def batches(documents: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Group documents into lists of about `size` bytes."""
    batch: list[bytes] = []
    room = size
    for document in documents:
        batch.append(document)
        room -= len(document) + 1
        if room <= 0:
            yield batch
            batch, room = [], size
    if batch:
        yield batch


def _documents(corpus: Corpus, span: Span, bad: BadDocuments) -> Iterator[bytes]:
    """Yield the documents of a span; supports every format except Parquet."""
    path, manifest = corpus.path(span.file), corpus.manifest
    if span.stop == 0 and manifest.txt_documents != "file":
        bad.add(partial(_location, path, 0, 1), "the file is empty")
        return
    match manifest.file_format:
        case "csv":
            yield from _csv(path, str(manifest.text_column), bad)
        case "jsonl":
            for where, line in _raw_lines(path, span, bad):
                yield from _json(line, str(manifest.text_column), where, bad)
        case "txt":
            pieces = {"file": _whole, "line": _text_lines, "section": _sections}
            for where, content in pieces[manifest.txt_documents or "file"](path, span, bad):
                yield from _utf8(content, where, bad)


Located = tuple[Callable[[], str], bytes]
"""A function that returns the `file:line` of some content, and the content."""


def _raw_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    """Yield the lines that start in the span, with their line ends.

    A compressed file is read to its end.
    """
    position = span.start
    number = 0
    stream = None
    try:
        with open_stream(path) as stream:
            if stream.peek(2)[:2] in UTF_16_MARKS:
                raise OSError("it is UTF-16, not UTF-8")
            if position:
                stream.seek(position - 1)
                position += _skip_line(stream, span.stop - position + 1) - 1
            while position < span.stop or is_compressed(path):
                line, size = _read_line(stream)
                if not size:
                    if not is_compressed(path):
                        raise OSError("it has become shorter")
                    return
                number += 1
                where = partial(_location, path, span.start, number)
                if position == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                position += size
                if size > MAX_DOCUMENT_BYTES:
                    bad.add(where, TOO_LONG)
                else:
                    yield where, line
    except OSError as error:
        _raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        lost = lost_bytes(stream, position, span.stop)
        bad.add(partial(_location, path, span.start, number + 1), why, lost_bytes=lost)


def _raise_if_refused(error: Exception) -> None:
    """Re-raise `error` if it is an I/O error of the operating system.

    A failing disk or network may recover, so it must not count as a bad document. Only damaged
    content does; its errors have no errno.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _skip_line(stream: BinaryIO, most: int) -> int:
    """Skip the rest of the current line, `most` bytes at most; return the number of bytes."""
    skipped = 0
    while skipped < most and (part := stream.readline(min(most - skipped, 2**20))):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """Read a line; return it and its full size in bytes.

    If the line is longer than MAX_DOCUMENT_BYTES, only its start is returned.
    """
    line = part = stream.readline(MAX_DOCUMENT_BYTES + 1)
    size = len(line)
    while part and not part.endswith(b"\n"):
        part = stream.readline(MAX_DOCUMENT_BYTES)
        size += len(part)
    return line, size


def _location(path: Path, start: int, number: int) -> str:
    """Return `file:line` of the `number`-th line that starts at or after byte `start`."""
    before = 0
    with path.open("rb") as file:
        while start > 0 and (chunk := file.read(min(start, 2**20))):
            before += chunk.count(b"\n")
            start -= len(chunk)
            if start == 0 and not chunk.endswith(b"\n"):
                before += 1  # the line that crosses `start` belongs to the previous span
    return f"{path}:{before + number}"


def _text_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    for where, line in _raw_lines(path, span, bad):
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
    for where, line in _raw_lines(path, span, bad):
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
        _raise_if_refused(error)
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


def _json(line: bytes, key: str, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    if line.isspace():
        return
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        bad.add(where, f"not UTF-8: byte {error.start} is 0x{line[error.start]:02x}")
    except ValueError as error:
        bad.add(where, f"not JSON: {error}")
    except RecursionError:
        bad.add(where, "not JSON that can be read: nested too deeply")
    else:
        if not isinstance(value, dict):
            bad.add(where, "not a JSON object")
        elif key not in value:
            bad.add(where, f"no key {key!r}")
        else:
            yield from _encoded(value[key], where, bad)


def _csv(path: Path, column: str, bad: BadDocuments) -> Iterator[bytes]:
    number = 0
    stream = None
    try:
        stream, rows = open_csv(path)
        with stream:
            while True:
                number = rows.line_num + 1
                where = partial(_location, path, 0, number)
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    bad.add(where, f"not CSV: {error}")
                    continue
                if column not in row:
                    bad.add(where, f"no column {column!r}")
                else:
                    yield from _encoded(row[column], where, bad)
    except OSError as error:
        _raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        lost = lost_bytes(stream and stream.buffer)
        bad.add(partial(_location, path, 0, number), why, lost_bytes=lost)


def _parquet(
    path: Path, span: Span, column: str, bad: BadDocuments, size: int
) -> Iterator[list[bytes]]:
    try:
        with pq.ParquetFile(path, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False) as file:
            groups = range(span.start, span.stop)
            rows = sum(file.metadata.row_group(group).num_rows for group in groups)
            at_once = max(1, rows * size // max(span.text_bytes, 1))
            for group in groups:
                yield from _row_group(file, path, group, column, at_once, bad)
    except (OSError, pa.ArrowException) as error:
        _raise_if_refused(error)
        lost = path.stat().st_size
        bad.add(lambda: str(path), f"cannot be read: {error}", lost_bytes=lost)


def _row_group(
    file: pq.ParquetFile, path: Path, group: int, column: str, at_once: int, bad: BadDocuments
) -> Iterator[list[bytes]]:
    row = 0
    try:
        for texts in _columns(file, group, column, at_once):
            yield _documents_of(texts, partial(_row, path, group), row, bad)
            row += len(texts)
        return
    except (OSError, pa.ArrowException) as error:
        _raise_if_refused(error)
    try:  # read the failed batch again row by row, to keep the rows before the damage
        for texts in islice(_columns(file, group, column, 1), row, None):
            yield _documents_of(texts, partial(_row, path, group), row, bad)
            row += 1
    except (OSError, pa.ArrowException) as error:
        _raise_if_refused(error)
        rows = file.metadata.row_group(group).num_rows
        why = f"the rest of row group {group}, {rows - row} rows, cannot be read: {error}"
        (chunks,) = text_chunks(path, column, slice(group, group + 1))
        lost = sum(chunk.total_compressed_size for chunk in chunks) * (rows - row) // rows
        bad.add(partial(_row, path, group, row), why, lost_bytes=lost, count=rows - row)


def _columns(file: pq.ParquetFile, group: int, column: str, rows: int) -> Iterator[pa.Array]:
    rows = min(rows, MAX_PARQUET_ROWS)
    found = file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False)
    return (batch.column(0) for batch in found)


def _documents_of(
    texts: pa.Array, where: Callable[[int], str], first: int, bad: BadDocuments
) -> list[bytes]:
    """Return the values that are documents; `first` is the row of `texts[0]` in its row group."""
    if _is_sound(texts):
        binary = pa.binary()  # `view` where possible: `cast` loads all of pyarrow.compute
        plain = pa.types.is_string(texts.type)
        found: list[bytes] = (texts.view(binary) if plain else texts.cast(binary)).to_pylist()
        return found
    return [
        document
        for number, value in enumerate(texts, first)
        for document in _value(value, partial(where, number), bad)
    ]


def _is_sound(texts: pa.Array) -> bool:
    """Return True if all values are documents.

    A string column of a Parquet file may contain bytes that are not UTF-8, hence the validation.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return is_text(texts.type) and not texts.null_count and texts.nbytes <= MAX_DOCUMENT_BYTES


def _value(value: pa.Scalar, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        bad.add(where, f"not UTF-8: {error.reason} at byte {error.start}")
    else:
        yield from _encoded(text, where, bad)


def _row(path: Path, group: int, row: int) -> str:
    """Return `file, row N`, with N counted from the start of the file."""
    footer = pq.read_metadata(path)
    before = sum(footer.row_group(earlier).num_rows for earlier in range(group))
    return f"{path}, row {before + row}"


def _encoded(value: object, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    """Yield `value` as UTF-8 if it is a string that can be encoded; record it in `bad` otherwise.

    A string longer than MAX_DOCUMENT_BYTES is recorded too.
    """
    if not isinstance(value, str):
        bad.add(where, f"the text is {'null' if value is None else type(value).__name__}")
        return
    try:
        content = value.encode()
    except UnicodeEncodeError as error:
        bad.add(where, f"not Unicode text: {error.reason} at character {error.start}")
        return
    if len(content) > MAX_DOCUMENT_BYTES:
        bad.add(where, TOO_LONG)
    else:
        yield content
