"""Files of raw text as streams of bytes, decompressed; the lines of a part of one, by number."""

from __future__ import annotations

import csv
import gzip
import io
import shlex
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from dtt.base.errors import ConfigError, InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused

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
"""Number of rows or lines in which columns are searched."""
CHUNK_BYTES = 2**16
"""Bytes of content that are decompressed at once. A call that fails loses what it has decompressed
until then, so this bounds the text before the damage that is lost. Smaller pieces lose less, but of
2**12 bytes, gzip takes a seventh longer."""
LINES_STEP = 2**22
"""Bytes between two places whose line numbers are kept: 5 kB of them for a file of 1 GB."""

Where = Callable[[], str]
"""A function that returns the `file:line` of some content.

Counting lines reads the file again, and most rows never need it."""
LocatedRow = tuple[Where, bytes | None, dict[str, Any]]
"""The location of a row, its JSON text if it has one, and its content: without one, texts only."""
Kinds = dict[str, str]
"""The columns of a file, by name, and the kind of their values."""
TEXT, NOTHING = "text", "null"
"""Kinds of columns: text, and only nulls in the part that was read."""


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


class Decompressed(io.RawIOBase):
    """The content of a compressed file; reading raises OSError at damage."""

    def __init__(self, path: Path, compression: str) -> None:
        """Open `path`; raise OSError if that fails."""
        super().__init__()
        self._path = path
        self._file: BinaryIO = path.open("rb")
        # `gzip` ignores zeros behind the last member, with which tapes and some uploads fill the
        # last block; pyarrow takes them for damage.
        if compression == "gzip":
            self._read = gzip.GzipFile(fileobj=self._file).read1
        else:
            self._read = pa.CompressedInputStream(self._file, compression).read
        self._size = self.unread_bytes = path.stat().st_size
        """Compressed bytes of the file that have not been read."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        """Read up to `len(buffer)` bytes; raise OSError for damaged content.

        Raises InputError for a zstd file that needs more memory than zstd's decoder allows, such as
        dumps of Pushshift and the Pile. Otherwise each of them would count as one unreadable
        document, and training would continue with the others.
        """
        try:
            content = self._read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            if "requires too much memory" in str(error):
                again = f"zstd -d --long=31 -c {shlex.quote(self._path.name)} | zstd -o NEW.zst"
                raise InputError(
                    "a file is compressed with a window that is too large to read",
                    where=self._path,
                    why="its window is larger than 128 MiB (zstd --long)",
                    next=f"compress it again: {again}",
                ) from None
            if getattr(error, "errno", None) is not None:  # the disk's, not the content's
                raise
            raise OSError(str(error)) from None
        finally:
            self.unread_bytes = self._size - self._file.tell()
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def is_compressed(path: Path) -> bool:
    """Return True if the file is compressed by its name, so that it must be read from its start."""
    return path.suffix.lower() in COMPRESSIONS


def open_stream(path: Path) -> io.BufferedReader:
    """Open `path` as a stream of decompressed bytes; reading raises OSError at damaged content."""
    if not is_compressed(path):
        return path.open("rb")
    compression = COMPRESSIONS[path.suffix.lower()]
    return io.BufferedReader(Decompressed(path, compression), buffer_size=CHUNK_BYTES)


def lost_bytes(stream: object, used: int, size: int) -> int:
    """Return about how many bytes of a file of `size` bytes are lost with its unreadable rest.

    `used` is the number of bytes of content that were used before the damage.
    """
    raw = getattr(stream, "raw", None)
    lost = raw.unread_bytes if isinstance(raw, Decompressed) else size - used
    # At least 1, although decoders read ahead, in a small file to its end: who chooses documents
    # by a column sees by the loss that there is damage.
    return max(1, lost)


def check_names(path: Path, names: list[str]) -> None:
    """Raise ConfigError if two columns have one name: a reader by name would take either."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two columns are called {twice[0]!r}",
            where=path,
            why="so it is unknown which of them holds the text",
            next="write the file again with other names",
        )


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


def raw_lines(path: Path, span: Span, bad: BadDocuments) -> Iterator[tuple[Where, bytes]]:
    """Yield the location and the bytes of each line that starts in the span, with its line end.

    A compressed file is read to its end.
    """
    position, number, stream = span.start, 0, None
    try:
        with open_stream(path) as stream:
            if position:
                position -= 1
                stream.seek(position)
                # To the end of the line that crosses the start; it may be as long as the file.
                while position < span.stop:
                    part = stream.readline(min(span.stop - position, 2**20))
                    position += len(part)
                    if not part or part.endswith(b"\n"):
                        break
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


_known: dict[tuple[Path, int, int], list[tuple[int, int]]] = {}
"""Places in files, ascending, and the number of line ends before each, by path, size and time.

Units of one file are read in any order, and each may have bad lines. Counting from the start of the
file for each of them took 207 GB of reads for a file of 810 MB.
"""


def location(path: Path, start: int, number: int) -> str:
    """Return `file:line` of the `number`-th line that starts at or after byte `start`."""
    if start == 0:
        return f"{path}:{number}"
    stat = path.stat()
    places = _known.setdefault((path, stat.st_size, stat.st_mtime_ns), [(0, 0)])
    at, ends = places[bisect_right(places, (start, start)) - 1]
    kept = at
    with path.open("rb") as file:
        file.seek(max(0, at - 1))
        last = file.read(min(at, 1))
        while at < start and (chunk := file.read(min(start - at, CHUNK_BYTES))):
            at, ends, last = at + len(chunk), ends + chunk.count(b"\n"), chunk[-1:]
            if at - kept >= LINES_STEP or at == start:
                insort(places, (at, ends))
                kept = at
    # The line that crosses `start` belongs to what is before it.
    crossing = last != b"\n"
    return f"{path}:{ends + crossing + number}"
