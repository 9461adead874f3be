"""The table of file formats of raw text.

A new format of rows is an entry in FORMATS, a name in the manifest's FileFormat, and one module
with the functions of the entry; what its reader raises for damage is one of `UNREADABLE`
(streams.py). One that is not UTF-8 is left out of `check_encodings` (download.py), as Parquet is,
which alone also tasks read by themselves (evaluate/tasks/task_data.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dtt.artifacts.corpus import FileFormat
from dtt.data.corpus import csv_rows, json_files, parquet
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.streams import COMPRESSIONS, Kinds, LocatedRow, Span


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format and its functions. Plain text has none of them."""

    known_as: str
    """Names in the message that lists the formats."""
    suffixes: tuple[str, ...]
    field: str = "column"
    """Word for a value of a row in messages."""
    rows: Callable[[Path, Span, BadDocuments], Iterator[LocatedRow]] | None = None
    """Yields the rows of a span. None for Parquet, too: it is read in batches of columns, so that
    sound texts become documents without a Python object for each row."""
    columns: Callable[[Path, str | None], Kinds] | None = None
    """Returns the columns; reads no more than tells that a column wanted by name holds text."""
    header: Callable[[Path], list[str]] | None = None
    """Returns the columns that every row has; None if a row may lack a column."""
    is_one_span: Callable[[Path], bool] = lambda _: False
    """Returns True for a file that must be read from its start; called once per file."""
    has_row_groups: bool = False
    """True if spans are row groups, and files hold compressed columns."""


FORMATS: dict[FileFormat, Format] = {
    "parquet": Format(
        known_as="parquet",
        suffixes=(".parquet",),
        columns=parquet.parquet_columns,
        header=parquet.header,
        has_row_groups=True,
    ),
    "jsonl": Format(
        known_as="jsonl, json (an array, or one object per line)",
        suffixes=(".jsonl", ".ndjson", ".json"),
        field="key",
        rows=json_files.json_objects,
        columns=json_files.json_columns,
        is_one_span=json_files.starts_with_array,
    ),
    "csv": Format(
        known_as="csv, tsv",
        suffixes=(".csv", ".tsv", ".tab"),
        rows=csv_rows.csv_rows,
        columns=csv_rows.csv_columns,
        header=csv_rows.csv_header,
        is_one_span=lambda _: True,  # a line end within quotes does not end a row
    ),
    "txt": Format(known_as="txt", suffixes=(".txt",)),
}
METADATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"))
"""Files beside the data of a Hub clone, or of `save_to_disk`, that are not data."""
*_FIRST, _LAST = (form.known_as for form in FORMATS.values())
# Parquet, the first of the table, compresses its columns itself.
KNOWN = f"{', '.join(_FIRST)} and {_LAST}, all but the first also as .gz or .zst"


def file_format(path: Path) -> FileFormat | None:
    """Return the format of a file by its name, or None if dtt does not support it."""
    if path.name in METADATA:
        return None
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    for name, form in FORMATS.items():
        if suffixes and suffixes[-1] in form.suffixes:
            return None if compressed and form.has_row_groups else name
    return None


def read_rows_of(
    file_format: FileFormat, path: Path, span: Span, bad: BadDocuments
) -> Iterator[LocatedRow]:
    """Yield the readable rows of a span; an empty file is recorded in `bad`."""
    rows = FORMATS[file_format].rows
    assert rows is not None
    if span.stop == 0:
        bad.add(partial("{}:1".format, path), "the file is empty")
    else:
        yield from rows(path, span, bad)
