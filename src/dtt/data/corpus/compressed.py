"""Decompressing streams of files whose name ends with .gz or .zst."""

from __future__ import annotations

import gzip
import io
import shlex
import zlib
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from dtt.base.errors import InputError

WINDOW_TOO_LARGE = "requires too much memory"
"""Part of the message of zstd's decoder for a frame whose window it does not allow."""
CHUNK_BYTES = 2**16
"""Bytes of content that are decompressed at once. A call that fails loses what it has decompressed
until then, so this bounds the text before the damage that is lost. Smaller pieces lose less, but of
2**12 bytes, gzip takes a seventh longer."""


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
        self.text_bytes = 0
        """Bytes of decompressed content read so far."""
        self.unread_bytes = 0
        """Compressed bytes of the file that were not read when damage was found."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        """Read up to `len(buffer)` bytes; raise OSError for damaged content."""
        try:
            content = self._read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            if WINDOW_TOO_LARGE in str(error):
                raise _wide_window(self._path) from None
            if getattr(error, "errno", None) is not None:  # the disk's, not the content's
                raise
            # At least 1, although both decoders read ahead, in a small file to its end: who chooses
            # documents by a column sees by the loss that there is damage.
            self.unread_bytes = max(1, self._path.stat().st_size - self._file.tell())
            raise OSError(str(error)) from None
        buffer[: len(content)] = content
        self.text_bytes += len(content)
        return len(content)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _wide_window(path: Path) -> InputError:
    """Return the error for a zstd file that needs more memory than zstd's decoder allows.

    Dumps of Pushshift and the Pile are such (`zstd --long=31`). Otherwise each of them would count
    as one unreadable document, and training would continue with the others.
    """
    return InputError(
        "a file is compressed with a window that is too large to read",
        where=path,
        why="its window is larger than 128 MiB (zstd --long)",
        next=f"compress it again: zstd -d --long=31 -c {shlex.quote(path.name)} | zstd -o NEW.zst",
    )


def lost_bytes(stream: object, used: int | None = None, size: int = 0) -> int:
    """Return about how many bytes are lost with the unreadable rest of a file of `size` bytes.

    `used` is the number of bytes of content that were used before the damage; None means that all
    readable content was used. For compressed files the result is the compressed bytes that cannot
    be read, plus the content that was decompressed but not used.
    """
    raw = getattr(stream, "raw", None)
    if isinstance(raw, Decompressed):
        return raw.unread_bytes + (0 if used is None else raw.text_bytes - used)
    return 0 if used is None else size - used
