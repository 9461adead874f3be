r"""Token files in Megatron's `.bin`/`.idx` format: a streaming writer and a memory-mapped reader.

The `.bin` file contains all token ids, concatenated. The `.idx` file, little endian, contains
`MMIDIDX\0\0`, uint64 version 1, uint8 dtype code, uint64 number of sequences S, uint64 number of
entries of the document index E, int32[S] lengths in tokens, int64[S] offsets in bytes, and int64[E]
document index (first sequence of each document, then S). dtt writes one sequence per document.
Files of other programs may have several per document, empty sequences, and documents without any
sequence; all of these are supported.

Conversations also have a `.mask` file with one byte per token: 1 if the token is a target, else 0.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifests import SplitCounts, TokenShard
from dtt.artifacts.token_folders import index_bytes
from dtt.base.errors import DamagedError, InputError
from dtt.base.files import named, sha256_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
DTYPE_CODES: dict[TokenDtype, int] = {"uint16": 8, "int32": 4}
UINT16_VOCAB_LIMIT = 65_500
PIECE = 2**18
"""Sequences whose part of an index is computed at once."""

TokenDtype = Literal["uint16", "int32"]
Tokens = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def token_dtype(vocab_size: int) -> TokenDtype:
    """Return the dtype that Megatron chooses for a vocabulary of this size."""
    return "uint16" if vocab_size < UINT16_VOCAB_LIMIT else "int32"


def bin_path(stem: Path) -> Path:
    """Return the path of the file with the token ids."""
    return stem.with_name(stem.name + ".bin")


def idx_path(stem: Path) -> Path:
    """Return the path of the index file, which has the document boundaries."""
    return stem.with_name(stem.name + ".idx")


def mask_path(stem: Path) -> Path:
    """Return the path of the loss mask, one byte per token: 1 if the token is a target."""
    return stem.with_name(stem.name + ".mask")


def map_file(path: Path, *, random: bool = False) -> Bytes:
    """Return all bytes of a file as a read-only array; `random` switches read-ahead off.

    The file is unmapped when no array refers to its bytes any more. The map holds a file
    descriptor, so keep few of them. Raises the errors of `open`, and OSError if the file cannot be
    mapped.
    """
    with path.open("rb") as file:
        # `mmap` refuses empty files.
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    # Windows of a shuffled source are a few kB each; the kernel would read 128 kB around each.
    if random and hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(content, dtype=np.uint8)


class TokenFile:
    """A `.bin`/`.idx` pair that is open for reading.

    Opening it reads only the header and the last entries of the index. Raises InputError if a file
    is missing, DamagedError if the two are inconsistent.
    """

    def __init__(self, stem: Path) -> None:
        """Open the pair at `stem`, the common path without `.bin` and `.idx`."""
        self.stem = stem
        try:
            idx_bytes = idx_path(stem).stat().st_size
            bin_bytes = bin_path(stem).stat().st_size
        except FileNotFoundError as error:
            raise InputError(
                "a token file is missing",
                where=error.filename,
                next="create it again: dtt tokenize",
            ) from None
        with idx_path(stem).open("rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise self._damaged("it is not a Megatron index: it does not start with MMIDIDX")
            version: int
            code: int
            self.sequences: int
            self._entries: int
            _, version, code, self.sequences, self._entries = HEADER.unpack(header)
            if version != VERSION:
                raise self._damaged(f"version {version} of the format; only {VERSION} is supported")
            if code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
                raise self._damaged(f"dtype code {code} is not an integer type")
            self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
            expected = index_bytes(self.sequences, self._entries)
            if idx_bytes != expected:
                raise self._damaged(f"it should have {expected} bytes, but has {idx_bytes}")
            end = self._end(file.fileno()) if self.sequences else 0
        if bin_bytes != end:
            raise self._damaged(
                f"its last sequence ends at byte {end}, but {bin_path(stem).name} has {bin_bytes}"
            )
        self.total = bin_bytes // self.dtype.itemsize
        """Tokens in the file."""

    def _end(self, fd: int) -> int:
        """Return the byte offset in the `.bin` of the end of the last sequence.

        Reads two entries of the index without mapping it.
        """
        length = os.pread(fd, 4, HEADER.size + 4 * (self.sequences - 1))
        offset = os.pread(fd, 8, HEADER.size + 12 * self.sequences - 8)
        return int.from_bytes(offset, "little") + (
            int.from_bytes(length, "little") * self.dtype.itemsize
        )

    @cached_property
    def _index(self) -> npt.NDArray[np.uint8]:
        return map_file(idx_path(self.stem))

    @cached_property
    def byte_offsets(self) -> Tokens:
        """int64[sequences]: byte offset in the `.bin` of each sequence's first token."""
        return self._array(HEADER.size + 4 * self.sequences, self.sequences)

    @cached_property
    def documents(self) -> Tokens:
        """int64[documents + 1]: the first sequence of each document, then `sequences`."""
        entries = self._array(HEADER.size + 12 * self.sequences, self._entries)
        if self._entries == 0 or entries[0] != 0 or entries[-1] != self.sequences:
            raise self._damaged("its document index does not cover its sequences")
        return entries

    def starts(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the index into the file of the first token of documents first … stop - 1.

        `stop` may be one more than the number of documents; the last value is then `total`.
        """
        sequences = self.documents[first:stop]
        starts = np.full(len(sequences), self.total, dtype=np.int64)
        inside = sequences[: np.searchsorted(sequences, self.sequences)]
        starts[: len(inside)] = self.byte_offsets[inside] // self.dtype.itemsize
        return starts

    def starting_after(self, token: int) -> int:
        """Return the first document whose first token is after `token`; no tokens are read."""
        offsets, entries = self.byte_offsets, self.documents
        sequence = offsets.searchsorted(token * self.dtype.itemsize, side="right")
        return int(entries.searchsorted(sequence))

    def bounds(self) -> npt.NDArray[np.int64]:
        """Return [documents + 1]: index of the first token of every document, then `total`."""
        return self.starts(0, self._entries)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents) - 1

    def _array(self, start: int, count: int) -> Tokens:
        return np.frombuffer(self._index, dtype="<i8", offset=start, count=count)

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            "a token file is damaged",
            where=idx_path(self.stem),
            why=why,
            next="create it again: dtt tokenize",
        )


class TokenFileWriter:
    """A writer of one `.bin`/`.idx` pair, which is synced and hashed when `close` returns.

    With `has_mask`, it also writes a `.mask` file. Leaving the context manager without calling
    `close` leaves an incomplete `.bin`, and an index without its header.

    Memory does not grow with the number of sequences: lengths go to their place in the index at
    once, and `close` computes the rest from there in pieces. A compressed file of 10^9 documents is
    one shard, whose index has 20 GB.
    """

    def __init__(self, stem: Path, vocab_size: int, *, has_mask: bool = False) -> None:
        """Create the files at `stem`; `vocab_size` bounds the ids and determines their dtype."""
        self._stem, self._vocab_size = stem, vocab_size
        self._dtype = token_dtype(vocab_size)
        self._counts = SplitCounts()
        self._index: BinaryIO = idx_path(stem).open("wb")
        self._index.write(bytes(HEADER.size))
        self._hash = hashlib.sha256()
        self._file: BinaryIO = bin_path(stem).open("wb")
        self._mask_hash = hashlib.sha256()
        self._mask: BinaryIO | None = mask_path(stem).open("wb") if has_mask else None

    def append(
        self,
        ids: Tokens,
        lengths: Tokens,
        mask: npt.NDArray[np.bool_] | None = None,
        text_bytes: int = 0,
    ) -> None:
        """Append sequences: their concatenated `ids` [sum(lengths)] and `lengths` [sequences].

        `mask` [sum(lengths)] is True for targets; it is written if the shard has a mask.
        `text_bytes` is the size of their text.

        Raises DamagedError for an id outside the vocabulary, before anything is written.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise DamagedError(
                f"a token id lies outside the vocabulary of {self._vocab_size}",
                where=self._stem,
                why=f"ids from {ids.min()} to {ids.max()}",
                next="check the tokenizer.json that was used",
            )
        content = ids.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False).data
        self._hash.update(content)
        with named(bin_path(self._stem)):
            self._file.write(content)
        if self._mask is not None:
            assert mask is not None
            assert len(mask) == len(ids)
            trained = mask.astype(np.uint8, copy=False).data
            self._mask_hash.update(trained)
            with named(mask_path(self._stem)):
                self._mask.write(trained)
        with named(idx_path(self._stem)):
            self._index.write(lengths.astype("<i4", copy=False).data)
        self._counts += SplitCounts(
            documents=len(lengths),
            tokens=len(ids),
            bytes=text_bytes,
            trained=None if mask is None else int(mask.sum()),
        )

    def close(
        self, split: Literal["train", "validation"] = "train", stem: str | None = None
    ) -> TokenShard:
        """Sync the `.bin`, write the index, and return the shard as a manifest names it.

        `stem` is the name that the files are renamed to; by default, they keep theirs.
        """
        _flush(self._file, bin_path(self._stem))
        if self._mask is not None:
            _flush(self._mask, mask_path(self._stem))
        with named(idx_path(self._stem)):
            self._complete_index()
        return TokenShard(
            split=split,
            stem=stem or self._stem.name,
            counts=self._counts,
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=sha256_file(idx_path(self._stem)),
            mask_sha256=None if self._mask is None else self._mask_hash.hexdigest(),
        )

    def _complete_index(self) -> None:
        """Write what follows the lengths, then the header."""
        file, count, tokens = self._index, self._counts.documents, 0
        file.flush()
        with idx_path(self._stem).open("rb") as written:
            written.seek(HEADER.size)
            for first in range(0, count, PIECE):
                lengths = np.fromfile(written, "<i4", min(PIECE, count - first))
                ends = np.cumsum(lengths, dtype=np.int64) + tokens
                offsets = (ends - lengths) * np.dtype(self._dtype).itemsize
                file.write(offsets.astype("<i8", copy=False).data)
                tokens = int(ends[-1])
        for first in range(0, count + 1, PIECE):
            file.write(np.arange(first, min(first + PIECE, count + 1), dtype="<i8").data)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self._dtype], count, count + 1))
        _flush(file, idx_path(self._stem))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._index.close()
        if self._mask is not None:
            self._mask.close()


def _flush(file: BinaryIO, path: Path) -> None:
    with named(path):
        file.flush()
        os.fsync(file.fileno())
