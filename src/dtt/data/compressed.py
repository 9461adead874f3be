"""Compressed files as streams that give all they can, also where a file is damaged."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa

CHUNK_BYTES = 2**16
"""What pyarrow reads of a compressed file at once. An error is in the last chunk that it read."""


class Decompressed(io.RawIOBase):
    """The content of a compressed file, to the last byte before the place where it breaks off.

    Reading raises OSError only after that. pyarrow alone loses what a failed call had decompressed,
    which may be hundreds of documents.
    """

    def __init__(self, path: Path, compression: str) -> None:
        """Raises OSError when the file cannot be opened."""
        super().__init__()
        self._path, self._compression = path, compression
        self._file = pa.OSFile(str(path))
        self._stream = pa.CompressedInputStream(self._file, compression)
        self._damage: OSError | None = None
        self.text_bytes = 0
        """Bytes of content that were read so far."""
        self.unread_bytes = 0
        """Bytes of the file, compressed, that cannot be read; known once it broke off."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        """Fill `buffer` as far as there is content; raises OSError at the end of damaged files."""
        try:
            size = int(self._stream.readinto(buffer))
        except OSError as error:
            if self._damage is not None or error.errno is not None:
                raise self._damage or error from None
            self._damage = error
            self._stream = io.BytesIO(self._rescue(self._file.tell()))
            size = self._stream.readinto(buffer)
        if not size and self._damage is not None:
            raise self._damage
        self.text_bytes += size
        return size

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()
        super().close()

    def _rescue(self, broke_at: int) -> bytes:
        """Return the content between what was read and the damage: read again, byte by byte."""
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


def lost_bytes(stream: object, used: int | None = None, size: int = 0) -> int:
    """Return about how much is lost with the rest of a file of `size` bytes, as it lies there.

    `used` is the number of bytes of its content before that; None: all that could be read.
    """
    raw = getattr(stream, "raw", None)
    if isinstance(raw, Decompressed):
        return raw.unread_bytes + (0 if used is None else raw.text_bytes - used)
    return 0 if used is None else size - used


class _Trickle(io.FileIO):
    """A file that gives single bytes from `start` on: a decompressor then stops at the bad one."""

    def __init__(self, path: Path, start: int) -> None:
        super().__init__(path)
        self._start = start

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._start - self.tell()
        return super().read(min(size or 0, left) if left > 0 else 1) or b""
