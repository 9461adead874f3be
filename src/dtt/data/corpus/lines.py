"""Lines of a text file, read from any byte on, with their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.compressed import lost_bytes
from dtt.data.corpus.line_numbers import location
from dtt.data.corpus.streams import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    Span,
    is_compressed,
    open_stream,
    read_line,
)

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
