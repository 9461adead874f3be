"""File formats of raw text: detection by file name, and opening as streams."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import BinaryIO, Literal

import pyarrow as pa

from dtt.data.corpus.bad_documents import raise_if_refused
from dtt.data.corpus.compressed import CHUNK_BYTES, Decompressed
from dtt.data.corpus.json_array import is_array, may_be_array

FileFormat = Literal["parquet", "jsonl", "csv", "txt"]

SUFFIXES: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".txt": "txt",
}
METADATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"))
"""Files beside the data of a Hub clone, or of `save_to_disk`, that are not data."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = (
    "parquet, jsonl, json (an array, or one object per line), csv, tsv and txt, "
    "all but the first also as .gz or .zst"
)

SHOWN = 3
"""Maximum number of unreadable files that are logged."""
UNREADABLE = (OSError, ValueError, csv.Error, pa.ArrowException)
"""Exceptions that the readers of the formats raise for a damaged file."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_DOCUMENT_BYTES = 64 * 2**20
"""Maximum length of a document. A longer one is assumed to be an error; this also bounds memory."""
TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"


def file_format(path: Path) -> FileFormat | None:
    """Return the format of a file by its name, or None if dtt does not support it."""
    if path.name in METADATA:
        return None
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes[-1:] == [".parquet"]:
            return None
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def is_compressed(path: Path) -> bool:
    """Return True if the file is compressed by its name, so that it must be read from its start."""
    return path.suffix.lower() in COMPRESSIONS


def open_stream(path: Path) -> io.BufferedReader:
    """Open `path` as a stream of decompressed bytes; reading raises OSError at damaged content."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    return io.BufferedReader(Decompressed(path, compression), buffer_size=CHUNK_BYTES)


def starts_with_array(path: Path) -> bool:
    """Return True if a file contains one JSON array; False if it cannot be read."""
    if not may_be_array(path):  # most files; opening them all takes minutes on a file server
        return False
    try:
        with open_stream(path) as stream:
            return is_array(stream)
    except OSError as error:
        raise_if_refused(error)
        return False


def delimiter(path: Path) -> str:
    """Return the character between the cells of a CSV file, by its name."""
    return "\t" if {".tsv", ".tab"} & {one.lower() for one in path.suffixes[-2:]} else ","


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


def is_text(kind: pa.DataType) -> bool:
    """Return True if a Parquet column of this type contains text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
