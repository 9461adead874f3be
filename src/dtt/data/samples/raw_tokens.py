"""Files of token ids without an index: headerless, or with the header of llm.c or numpy.

    raw      token ids and nothing else (nanoGPT's train.bin)
    llm.c    256 int32: magic number, version, number of tokens, zeros; then the token ids
             (modded-nanogpt reads and writes the same)
    numpy    a file written by `numpy.save`: a text header, then the token ids

Known formats that do not hold token ids are recognised and rejected by name. Read as ids, they
would be noise that a model with a large vocabulary trains on without an error.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dtt.base.errors import ConfigError, DamagedError, InputError

RawFormat = Literal["raw", "llm.c", "numpy"]
Ids = npt.NDArray[Any]

HEAD_BYTES = 4096
"""Bytes read from each file when it is opened: one page, the least that a disk reads anyway."""
MIN_TEXT = 64
"""Minimum number of bytes to inspect before a file may be classified as text."""
MIN_IDS = 32
"""Minimum number of ids that must fit a different dtype before dtt doubts the configured one."""

LLM_C_HEADER = 256 * 4
NUMPY_MAGIC = b"\x93NUMPY"
MAGIC: dict[bytes, tuple[int, str] | str] = {
    # Token ids of llm.c (dev/data/data_common.py): version and dtype. Then its other files.
    (20240520).to_bytes(4, "little"): (1, "<u2"),
    (20240801).to_bytes(4, "little"): (7, "<u4"),
    (20240326).to_bytes(4, "little"): "weights of llm.c",
    (20240327).to_bytes(4, "little"): "an optimizer state of llm.c",
    (20240328).to_bytes(4, "little"): "a tokenizer of llm.c",
    (20240522).to_bytes(4, "little"): "an evaluation file of llm.c",
    (20240803).to_bytes(4, "little"): "weights of llm.c",
    b"MMIDIDX\0\0": "the index of a Megatron pair",
    b"TNTIDX\0\0": "an index of fairseq",
    b"LITPKDS": "a packed data set of lit-gpt",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"PK\x03\x04": "a zip archive (as written by numpy.savez and torch.save)",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x1f\x8b\x08\0": "compressed with gzip",
    b"\x1f\x8b\x08\x08": "compressed with gzip",
    b"\xfd7zXZ\0": "compressed with xz",
}
"""Version and dtype of a file of ids, or the name of a format that does not hold token ids.

Each magic number has at least four bytes, because ids may start with any shorter sequence."""
CONVERT = (
    "dtt tokenize its text; or write its token ids, document after document, with "
    "numpy.save('train.npy', ids) and use that file"
)


class Header(NamedTuple):
    """Header of a file of token ids, derived from its first bytes and its size."""

    format: RawFormat
    offset: int
    """Bytes before the first id."""
    dtype: str
    """numpy dtype string, little-endian."""
    tokens: int


def read_header(path: Path, raw_dtype: str) -> Header:
    """Return the header of a file of ids.

    `raw_dtype` is the dtype of ids without a header. Raises InputError for a file in a known format
    that does not hold token ids, DamagedError if the file size contradicts the header.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        known = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
        # Under 12 bytes llm.c has no header: these are ids that start like one.
        if known is None or (isinstance(known, tuple) and len(head) < 12):
            known = _other(head, size, file)
    if isinstance(known, str):
        raise refusal(path, known)
    if known is not None:
        (known_version, ids), (magic, version, count) = known, struct.unpack_from("<3i", head)
        if version != known_version:
            raise InputError(
                "an unknown version of llm.c's token files",
                where=path,
                why=f"version {version} after the magic number {magic}; "
                f"only {known_version} is known",
                next=CONVERT,
            )
        header = Header("llm.c", LLM_C_HEADER, ids, count)
    elif head.startswith(NUMPY_MAGIC):
        header = _numpy(path, head)
    else:
        raw = np.dtype(raw_dtype).newbyteorder("<")
        if size % raw.itemsize:
            raise DamagedError(
                "the size of a file of raw ids is not a multiple of the size of an id",
                where=path,
                why=f"{size} bytes, ids of {raw.itemsize}",
                next="dtype: uint16, uint32, int32 or int64 next to the path of the source",
            )
        header = Header("raw", 0, raw.str, size // raw.itemsize)
    dtype = np.dtype(header.dtype)
    expected = header.offset + header.tokens * dtype.itemsize
    if size != expected:
        raise DamagedError(
            "a file of token ids is shorter or longer than its header states",
            where=path,
            why=f"{size:,} bytes; {header.tokens:,} ids of {dtype.name} behind a header of "
            f"{header.offset:,} bytes are {expected:,}",
        )
    return header


def refusal(path: Path, other: str) -> InputError:
    """Return the error for a file or folder in the format `other`, which dtt does not read."""
    return InputError(
        "not token ids in a format that dtt reads",
        where=path,
        why=f"it is {other}" if path.is_file() else f"it holds {other}",
        next=CONVERT,
    )


def _numpy(path: Path, head: bytes) -> Header:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    except ValueError as error:
        raise DamagedError(
            "the header of a numpy file cannot be read",
            where=path,
            why=str(error).splitlines()[0],
        ) from None
    offset, wanted = file.tell(), "numpy.save(PATH, ids.reshape(-1).astype('<u4'))"
    why = None
    if len(shape) != 1:
        why = f"an array of shape {shape}, not one-dimensional"
    elif dtype.kind not in "iu":
        why = f"an array of {dtype}, not of integers"
    elif dtype.itemsize > 1 and dtype.str[0] == ">":
        why = f"an array of {dtype.name} in big-endian byte order"
    elif offset % dtype.itemsize:
        why = f"an array that starts at byte {offset}, which is not a multiple of {dtype.itemsize}"
    if why is not None:
        raise InputError(
            "not a one-dimensional array of token ids", where=path, why=f"it is {why}", next=wanted
        )
    return Header("numpy", offset, dtype.str, int(shape[0]))


def _other(head: bytes, size: int, file: BinaryIO) -> str | None:
    """Return the format without ids and magic number that a file has; None if it may be ids."""
    if len(head) < 12:
        return None
    if head[:3] in (b"\x80\x04\x95", b"\x80\x05\x95") and head[7:11] == bytes(4):
        return "a pickle"
    if head[4:10] == b'\0\0\0\0{"' and int.from_bytes(head[:8], "little") + 8 <= size:
        return "a safetensors file"
    if len(head) >= MIN_TEXT and _is_text(head):
        return "text"
    return _chunk(head, size, file)


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # a character cut off at the end is fine
            return False
        text = head[: error.start].decode()
    return all(c.isprintable() or c.isspace() for c in text)


def _chunk(head: bytes, size: int, file: BinaryIO) -> str | None:
    """Recognise a chunk of litdata or a shard of MosaicML Streaming.

    Both start with the number n of samples and n + 1 sample offsets, all uint32; the last offset is
    the size of the file. A Streaming shard has a JSON description after the offsets.
    """
    samples, first = struct.unpack_from("<2I", head)
    table = 4 * (samples + 2)
    if not (samples and table <= first <= size):
        return None
    file.seek(table - 4)
    if int.from_bytes(file.read(4), "little") != size:
        return None
    if first == table:
        return "a chunk of litdata"
    return "a shard of MosaicML's streaming" if file.read(1) == b"{" else None


def check_width(path: Path, ids: Ids, vocab_size: int | None) -> None:
    """Raise ConfigError if the first `ids` of a raw file look like ids of a wider dtype.

    The high-order parts of wide ids are zero, or at most a few in a vocabulary above 65,536. No
    text has such small ids at every second position. `vocab_size` is None if unknown.
    """
    if len(ids) < MIN_IDS or ids.itemsize == 8:
        return
    limit = ((vocab_size or 2**18) - 1) >> (8 * ids.itemsize)
    first, second = ids[::2], ids[1::2]
    # Big-endian ids begin with the high-order part. The low-order ones are large, unless the ids
    # are all tiny, such as zeros.
    parts = ((second, first), (first.byteswap(), second))
    if any(int(high.max()) <= limit < int(low.max()) for high, low in parts):
        raise ConfigError(
            f"token ids are read as {ids.dtype.name}, but look like those of a wider type",
            where=path,
            why=f"every second of the first {len(ids):,} ids is "
            + ("0" if limit == 0 else "almost always 0, as the upper half of a wider id is"),
            next="dtype: uint32, int32 or int64 next to the path of the source (dtt data inspect: "
            "--dtype); if the ids are big-endian, write them again with numpy.save",
        )
