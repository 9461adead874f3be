"""Decompressing streams that return all readable content of a file, even if it is damaged."""

from __future__ import annotations

import gzip
import io
import shlex
import zlib
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from dtt.base.errors import InputError

WINDOW_TOO_LARGE = "requires too much memory"
"""Part of the message of zstd's decoder for a frame whose window it does not allow."""
CHUNK_BYTES = 2**16
"""Bytes of a compressed file that pyarrow reads at once. Damage lies in the last chunk it read."""


class Decompressed(io.RawIOBase):
    """The content of a compressed file, up to the last byte before any damage.

    Reading raises OSError only after that byte. pyarrow alone discards what a failed call had
    already decompressed, which may be hundreds of documents.
    """

    def __init__(self, path: Path, compression: str) -> None:
        """Open `path`; raise OSError if that fails."""
        super().__init__()
        self._path, self._compression = path, compression
        self._file = pa.OSFile(str(path))
        self._stream = pa.CompressedInputStream(self._file, compression)
        self._damage: OSError | None = None
        self.text_bytes = 0
        """Bytes of decompressed content read so far."""
        self.unread_bytes = 0
        """Compressed bytes of the file that cannot be read; set once damage was found."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        """Read up to `len(buffer)` bytes; raise OSError once a damaged file has no more content."""
        try:
            size = int(self._stream.readinto(buffer))
        except OSError as error:
            if self._damage is not None or error.errno is not None:
                raise self._damage or error from None
            if WINDOW_TOO_LARGE in str(error):
                raise _wide_window(self._path) from None
            self._damage = error
            self._stream = io.BytesIO(self._rescue(self._file.tell()))
            size = self._stream.readinto(buffer)
        if not size and self._damage is not None and not self._is_only_padded():
            raise self._damage
        self.text_bytes += size
        return size

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()
        super().close()

    def _is_only_padded(self) -> bool:
        """Return True if the content ends with zeros after a complete gzip member.

        Tapes and some uploads fill the last block so, and gzip itself ignores them (RFC 1952 does
        not mention them). Reads the file again, since zeros may also be the rest of a torn write.
        """
        if self._compression != "gzip" or self.unread_bytes == self._path.stat().st_size:
            return False
        with suppress(OSError, EOFError, zlib.error), gzip.open(self._path) as file:
            while file.read(CHUNK_BYTES):
                pass
            self.unread_bytes = 0
            return True
        return False

    def _rescue(self, broke_at: int) -> bytes:
        """Return the content between the current position and the damage.

        Decompresses the file again from its start, and byte by byte near the damage.
        """
        with _Trickle(self._path, max(0, broke_at - CHUNK_BYTES)) as file:
            stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), self._compression)
            read = 0
            while read < self.text_bytes:
                read += len(stream.read(min(CHUNK_BYTES, self.text_bytes - read)))
            content = bytearray()
            try:
                while byte := stream.read(1):
                    content += byte
            except OSError as error:
                if error.errno is not None:
                    raise
            self.unread_bytes = self._path.stat().st_size - file.tell()
            return bytes(content)


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


class _Trickle(io.FileIO):
    """A file that returns one byte per read from `start` on.

    A decompressor that reads from it stops exactly at the damaged byte.
    """

    def __init__(self, path: Path, start: int) -> None:
        super().__init__(path)
        self._start = start

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._start - self.tell()
        return super().read(min(size or 0, left) if left > 0 else 1) or b""
