"""Decompressing streams that return all readable content of a file, even if it is damaged."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

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


MAX_ZSTD_WINDOW = 2**27
"""Bytes of the largest window that zstd's decoder, and so pyarrow's, accepts by default."""
ZSTD_FRAME, ZSTD_SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
"""Magic numbers of frames."""


def zstd_window(path: Path) -> int:
    """Return the window of the first frame of a zstd file, in bytes; 0 if it is not one.

    The format is RFC 8878, section 3.1.1.1. Dumps of Pushshift and the Pile have windows of 2 GiB
    (`zstd --long=31`).
    """
    with path.open("rb") as file:
        while True:
            start = file.read(8)
            if len(start) < 8:
                return 0
            magic, size = struct.unpack("<II", start)
            if magic not in ZSTD_SKIPPABLE:
                break
            file.seek(size, io.SEEK_CUR)
        if magic != ZSTD_FRAME:
            return 0
        file.seek(-4, io.SEEK_CUR)
        header = file.read(14)
    descriptor = header[0]
    if not descriptor & 0x20:  # else a single segment, whose window is its content
        exponent, mantissa = header[1] >> 3, header[1] & 7
        return (8 + mantissa) << (7 + exponent)
    start_of_size = 1 + (0, 1, 2, 4)[descriptor & 3]
    width = (1, 2, 4, 8)[descriptor >> 6]
    content = int.from_bytes(header[start_of_size : start_of_size + width], "little")
    return content + 256 * (width == 2)


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
