"""The complete lines that a job appends to its metrics.jsonl, with secrets redacted."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from dtt.base.reading import SMALL, open_regular
from dtt.base.secrets import redacted

PIECE = 2**18
"""Bytes that one call of `read` returns at most, unless a single line is longer."""
LOOKS_PER_OPEN = 4
"""Looks at the size of the file per opening of it. NFS clients may answer `stat` from a cache that
is up to a minute old, but must ask the server when a file is opened."""


class AppendedLines:
    """The lines after an offset of a file that grows.

    The file is not kept open: on NFS, a folder with an open file cannot be deleted.
    """

    def __init__(self, path: Path, offset: int) -> None:
        """`offset`: position in bytes after the last line that is already known."""
        self._path = path
        self._offset = offset
        self._file: tuple[int, int] | None = None  # device and inode
        self._size = -1
        self._looks = 0
        self._ended = False

    def read(self) -> list[str] | None:
        """Return the next complete lines, without line feeds; none if nothing was appended.

        Returns None if the file was replaced or cut off, or if no line of it starts at the offset.
        """
        try:
            return self._read() if self._may_have_changed() else []
        except FileNotFoundError:  # without an offset, the job has not started
            return None if self._offset or self._file else []
        except (OSError, ValueError):  # a busy file server, or something that is not a file
            return []

    def _may_have_changed(self) -> bool:
        self._looks += 1
        if self._ended:
            return False
        if self._looks % LOOKS_PER_OPEN == 1:
            return True
        now = self._path.stat()
        return now.st_size != self._size or (now.st_dev, now.st_ino) != self._file

    def _read(self) -> list[str] | None:
        fd = open_regular(self._path)
        try:
            now = os.fstat(fd)
            file = (now.st_dev, now.st_ino)
            if now.st_size < self._offset or self._file not in (None, file):
                return None
            before = min(self._offset, 1)  # the line feed of the last line
            content = os.pread(fd, before + PIECE, self._offset - before)
            if content[:before] != b"\n"[:before]:
                return None
            if len(content) == before + PIECE and b"\n" not in content[before:]:
                content = os.pread(fd, before + SMALL, self._offset - before)
                # dtt writes no such line, and it would be read again each time it grows.
                self._ended = b"\n" not in content[before:] and len(content) == before + SMALL
        finally:
            os.close(fd)
        complete = content[before : content.rfind(b"\n") + 1]
        self._file = file
        self._offset += len(complete)
        # More lines may follow this piece; the rest of an incomplete line is waited for.
        self._size = -1 if complete and self._offset < now.st_size else now.st_size
        return list(_lines(complete))


@lru_cache(maxsize=16)
def _lines(content: bytes) -> tuple[str, ...]:
    """Return the lines of `content`, each without its line feed and without secrets.

    The result is kept, since all viewers of a job read the same content at about the same time, and
    redaction takes longer than reading.
    """
    if not content:
        return ()
    text = content.decode(errors="replace")
    lines = text.removesuffix("\n").split("\n")
    # Redaction reads the complete environment, so it is called once for many harmless lines. A
    # backslash may hide a secret that contains a quote or a character that JSON escapes.
    harmless = redacted(text) == text
    return tuple(x if harmless and "\\" not in x else redacted_json(x) for x in lines)


def redacted_json(line: str) -> str:
    """Return a line of JSON without secrets, and unchanged if there are none.

    Only strings are redacted, since a secret in the text may end in the middle of a JSON token. A
    line that is not JSON is redacted as text.
    """
    try:
        value = json.loads(line)
        clean = _without_secrets(value)
        return line if clean == value else json.dumps(clean)
    except (ValueError, RecursionError):
        return redacted(line)


def _without_secrets(value: Any) -> Any:
    match value:
        case str():
            return redacted(value)
        case dict():
            return {redacted(name): _without_secrets(inner) for name, inner in value.items()}
        case list():
            return [_without_secrets(inner) for inner in value]
    return value
