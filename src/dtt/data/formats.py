"""File formats of raw text: told by the name, opened as streams, their columns listed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.errors import ConfigError, DamagedError, InputError

FileFormat = Literal["parquet", "jsonl", "csv", "txt"]

SUFFIXES: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".txt": "txt",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = "parquet, jsonl, json (one object a line), csv and txt, the last four also as .gz or .zst"

TEXT_COLUMNS = ("text", "content", "document", "body")
FIRST_LINES = 100
"""Of a .jsonl file, in which its columns are looked for."""
UNREADABLE = (OSError, ValueError, csv.Error, pa.ArrowException)
"""What the readers of the formats raise for a damaged file."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
BUFFER_BYTES = 2**16
"""Of a compressed file that breaks off, at most so much that could be read is lost."""
MAX_DOCUMENT_BYTES = 64 * 2**20
"""A longer document is taken for a mistake; it also bounds memory."""


def file_format(path: Path) -> FileFormat | None:
    """The format that the name of a file tells, or None when dtt does not read it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes[-1:] == [".parquet"]:
            return None
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def is_compressed(path: Path) -> bool:
    """Whether the file must be read from its start."""
    return path.suffix.lower() in COMPRESSIONS


def open_stream(path: Path) -> io.BufferedReader:
    """The content of `path`, decompressed; reading raises OSError where a file breaks off."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    stream = pa.CompressedInputStream(pa.OSFile(str(path)), compression)
    return io.BufferedReader(stream, buffer_size=BUFFER_BYTES)


def open_csv(path: Path) -> tuple[io.TextIOWrapper, csv.DictReader[str]]:
    """The file and its rows; bytes that are no UTF-8 come as lone surrogates."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    stream = io.TextIOWrapper(
        open_stream(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    return stream, csv.DictReader(stream, strict=True)


def find_text_column(paths: Sequence[Path], asked: str | None) -> str:
    """The column of `paths` to read: the one `asked` for, or what looks like the text in the first.

    Raises ConfigError that lists the columns when a file has no such column or there is no telling,
    and DamagedError when the first cannot be read; others are left to the reader of documents.
    """
    column = _choose_column(paths[0], asked)
    for path in paths[1:]:
        try:
            columns, texts = _columns(path, objects=1)
        except UNREADABLE:
            continue
        if columns and column not in columns:
            raise _no_column(path, f"there is no column {column!r}", columns, texts)
    return column


def _choose_column(path: Path, asked: str | None) -> str:
    try:
        columns, texts = _columns(path, objects=FIRST_LINES)
    except UNREADABLE as error:
        raise DamagedError(
            "cannot read a file of the dataset",
            where=path,
            why=str(error).splitlines()[0],
            next="fetch or write the file again",
        ) from None
    if not columns and file_format(path) == "jsonl":
        raise InputError(
            "no JSON object at the start of the file",
            where=path,
            why=f"looked at the first {FIRST_LINES} lines",
            next='check that each line is an object such as {"text": "…"}',
        )
    if asked is not None:
        if asked not in columns:
            raise _no_column(path, f"there is no column {asked!r}", columns, texts)
        if asked not in texts:
            raise _no_column(path, f"column {asked!r} does not hold text", columns, texts)
        return asked
    for name in TEXT_COLUMNS:
        if name in texts:
            return name
    if len(texts) == 1:
        return texts[0]
    raise _no_column(path, "cannot tell which column holds the text", columns, texts)


def _no_column(path: Path, what: str, columns: list[str], texts: list[str]) -> ConfigError:
    return ConfigError(
        what,
        where=path,
        why=f"columns: {', '.join(columns) or 'none'}; with text: {', '.join(texts) or 'none'}",
        next=f"download.text_column={texts[0] if texts else 'NAME'}",
    )


def _columns(path: Path, objects: int) -> tuple[list[str], list[str]]:
    """All columns, and those that hold text; of JSON, in the first so many objects."""
    match file_format(path):
        case "parquet":
            schema = pq.read_schema(path)
            return schema.names, [field.name for field in schema if is_text(field.type)]
        case "csv":
            stream, rows = open_csv(path)
            with stream:
                names = [name for name in rows.fieldnames or () if name]
            return names, names
        case _:
            keys: dict[str, bool] = {}
            for value in islice(_json_objects(path), objects):
                for key, inner in value.items():
                    keys[key] = keys.get(key, False) or isinstance(inner, str)
            return list(keys), [key for key, is_text in keys.items() if is_text]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of Parquet is text by its type."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Those in the first lines; lines that are no objects are left to the reader of documents."""
    any_yet = False
    with open_stream(path) as stream:
        for line in islice(stream, FIRST_LINES):
            content = line.removeprefix(BYTE_ORDER_MARK).strip()
            if not any_yet and content.startswith(b"["):
                raise ConfigError(
                    "a JSON array is not JSON lines",
                    where=path,
                    why="one object per line can be read in parallel and in bounded memory",
                    next=f"jq -c '.[]' {path.name} > {path.with_suffix('.jsonl').name}",
                )
            try:
                value = json.loads(content)
            except ValueError:
                continue
            if isinstance(value, dict):
                any_yet = True
                yield value


def one_format(paths: list[Path], dataset: str) -> FileFormat:
    """The format that all `paths` share; InputError or ConfigError when there is no such."""
    examples: dict[FileFormat, Path] = {}
    for path in paths:
        found = file_format(path)
        if found is not None:
            examples.setdefault(found, path)
    if not examples:
        raise InputError(
            f"no file of {dataset} has a format dtt reads",
            why=f"found {', '.join(path.name for path in paths[:3])}"
            if paths
            else "no file at all",
            next=f"use {KNOWN}",
        )
    if len(examples) > 1:
        raise ConfigError(
            f"{dataset} mixes formats",
            why=", ".join(f"{path.name} is {name}" for name, path in examples.items()),
            next="name a file, or a folder with one format",
        )
    return next(iter(examples))
