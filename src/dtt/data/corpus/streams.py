"""Files of raw text as streams of bytes, decompressed, and the lines of a part of one."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.compressed import CHUNK_BYTES, Decompressed, lost_bytes
from dtt.data.corpus.line_numbers import location

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
UNREADABLE_SHOWN = 3
"""Maximum number of unreadable files that are logged."""
UNREADABLE = (OSError, ValueError, csv.Error, pa.ArrowException)
"""Exceptions that the readers of the formats raise for a damaged file."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_DOCUMENT_BYTES = 64 * 2**20
"""Maximum length of a document. A longer one is assumed to be an error; this also bounds memory."""
TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"
FIRST_ROWS = 100
"""Number of rows or lines in which columns, and the likeliest text among them, are searched."""

Located = tuple[Callable[[], str], bytes]
"""A function that returns the `file:line` of some content, and the content."""
LocatedRow = tuple[Callable[[], str], bytes | None, dict[str, Any]]
"""A function that returns the `file:line` of a row, its JSON text if it has one, and its content.

The location is a function since counting lines reads the file again; most rows never need it."""


def is_compressed(path: Path) -> bool:
    """Return True if the file is compressed by its name, so that it must be read from its start."""
    return path.suffix.lower() in COMPRESSIONS


def open_stream(path: Path) -> io.BufferedReader:
    """Open `path` as a stream of decompressed bytes; reading raises OSError at damaged content."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    return io.BufferedReader(Decompressed(path, compression), buffer_size=CHUNK_BYTES)


def read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """Read a line; return it and its full size in bytes, 0 at the end.

    If the line is longer than MAX_DOCUMENT_BYTES, only its start is returned.
    """
    line = part = stream.readline(MAX_DOCUMENT_BYTES + 1)
    size = len(line)
    while part and not part.endswith(b"\n"):
        part = stream.readline(MAX_DOCUMENT_BYTES)
        size += len(part)
    return line, size


@dataclass(frozen=True)
class Span:
    """Part of a file: row groups `[start, stop)` of Parquet, bytes `[start, stop)` otherwise.

    A byte range contains the lines that start in it; its last line may extend beyond `stop`.
    """

    file: int
    """Index into the manifest's files."""
    start: int
    stop: int
    text_bytes: int
    """Estimated bytes of text in the span."""


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
