"""The documents of a span of a corpus, one after the other as UTF-8, in bounded memory.

What cannot be read is reported to a BadDocuments with file and line, and left out.
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
"""Paragraphs are put together up to about this size where documents are sections."""
BATCH_BYTES = 2**21
MAX_PARQUET_ROWS = 2**16
PARQUET_BUFFER_BYTES = 2**20
"""Read from the file at once, however large a row group is."""
TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"


class BadDocuments:
    """Counts documents that cannot be read and remembers where the first few are."""

    def __init__(self, *, stop: bool = False, shown: int = 5) -> None:
        """With `stop`, the first one raises DamagedError."""
        self.count = self.lost_bytes = 0
        self.examples: list[str] = []
        self._stop, self._shown = stop, shown

    def add(
        self, where: Callable[[], str], why: str, *, lost_bytes: int = 0, count: int = 1
    ) -> None:
        """Note one; `where` is only called for those that are shown, as it may be slow.

        Where the rest of a damaged file goes with it, `lost_bytes` is about the size of that, and
        `count` the number of documents, if known.
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
    """Every document of `unit` that can be read, empty ones included, in the order of the files.

    About `at_once` bytes are read and decoded before the first is there.
    """
    return chain.from_iterable(read_batches(corpus, unit, bad, at_once))


def read_batches(
    corpus: Corpus, unit: Unit, bad: BadDocuments, size: int = BATCH_BYTES
) -> Iterator[list[bytes]]:
    """The same in lists of about `size` bytes, by default what the processor's cache holds."""
    for span in unit.spans:
        if corpus.manifest.file_format == "parquet":
            column = str(corpus.manifest.text_column)
            yield from _parquet(corpus.path(span.file), span, column, bad, size)
        else:
            yield from batches(_documents(corpus, span, bad), size)


def batches(documents: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Documents in lists of about so many bytes."""
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
    """Those of a span, of any format but Parquet."""
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
"""Content, and a function that tells its `file:line`."""


def _raw_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    """Lines that start in the span, line ends kept; a compressed file is read to its end."""
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
    """A disk or network that fails is no bad document: it may be well again. Only damage is one."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _skip_line(stream: BinaryIO, most: int) -> int:
    """Go to the next line, by at most so many bytes; returns by how many."""
    skipped = 0
    while skipped < most and (part := stream.readline(min(most - skipped, 2**20))):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """A line and its full size; of one that is too long only the start is kept."""
    line = part = stream.readline(MAX_DOCUMENT_BYTES + 1)
    size = len(line)
    while part and not part.endswith(b"\n"):
        part = stream.readline(MAX_DOCUMENT_BYTES)
        size += len(part)
    return line, size


def _location(path: Path, start: int, number: int) -> str:
    """`file:line` of the `number`-th line that starts at or after byte `start`."""
    before = 0
    with path.open("rb") as file:
        while start > 0 and (chunk := file.read(min(start, 2**20))):
            before += chunk.count(b"\n")
            start -= len(chunk)
            if start == 0 and not chunk.endswith(b"\n"):
                before += 1  # the line across `start` belongs to the span before
    return f"{path}:{before + number}"


def _text_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    for where, line in _raw_lines(path, span, bad):
        content = line.rstrip(b"\r\n")
        if content:
            yield where, content


def _sections(path: Path, span: Span, bad: BadDocuments) -> Iterator[Located]:
    """Runs of whole paragraphs of about SECTION_BYTES; together they are the text, unchanged.

    A paragraph that is longer by itself is cut at a line end.
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
    """A document, if it is what it should be."""
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
    try:  # what could be read of the batch that failed, row by row
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
    """Return the values that are documents; `first` is the row of the first one in its group."""
    if _is_sound(texts):
        binary = pa.binary()  # a view, as `cast` loads all functions of pyarrow.compute
        plain = pa.types.is_string(texts.type)
        found: list[bytes] = (texts.view(binary) if plain else texts.cast(binary)).to_pylist()
        return found
    return [
        document
        for number, value in enumerate(texts, first)
        for document in _value(value, partial(where, number), bad)
    ]


def _is_sound(texts: pa.Array) -> bool:
    """Whether all are documents: Parquet may call text what is none."""
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
    """`file, row N`, counted from the start of the file."""
    footer = pq.read_metadata(path)
    before = sum(footer.row_group(earlier).num_rows for earlier in range(group))
    return f"{path}, row {before + row}"


def _encoded(value: object, where: Callable[[], str], bad: BadDocuments) -> Iterator[bytes]:
    """A value, if it is text that has a UTF-8 form."""
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
