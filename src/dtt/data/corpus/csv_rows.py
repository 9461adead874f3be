"""Rows of CSV files: lines of a bounded size, and no guess where a row starts after a mistake."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dtt.base.errors import ConfigError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.streams import (
    MAX_DOCUMENT_BYTES,
    TEXT,
    TOO_LONG,
    Kinds,
    LocatedRow,
    Span,
    check_names,
    location,
    lost_bytes,
    open_stream,
)


class CsvFile:
    """A CSV file as rows of cells, with what has to be known about the row that is being read.

    It iterates over lines. Bytes that are not UTF-8 are decoded as lone surrogates.
    """

    def __init__(self, path: Path) -> None:
        """Open the file."""
        csv.field_size_limit(MAX_DOCUMENT_BYTES)
        self.stream = io.TextIOWrapper(
            open_stream(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self.rows = csv.reader(self, strict=True, delimiter=delimiter(path))
        self.lines = 0
        """Number of lines read so far."""
        self.used = 0
        """Characters read so far."""
        self.quoted = False
        """True if a quote has been read since the row started."""
        self.row = 0
        """Characters read since the row started."""

    def __iter__(self) -> CsvFile:
        return self

    def __next__(self) -> str:
        """Return the next line; raise csv.Error for a row of more than MAX_DOCUMENT_BYTES.

        The rest of such a line is skipped, so that memory is bounded.
        """
        line = part = self.stream.readline(MAX_DOCUMENT_BYTES)
        if not line:
            raise StopIteration
        self.lines += 1
        while True:
            self.used += len(part)
            self.row += len(part)
            self.quoted |= '"' in part
            if len(part) < MAX_DOCUMENT_BYTES or part.endswith(("\n", "\r")):
                break
            part = self.stream.readline(MAX_DOCUMENT_BYTES)
        if self.row > MAX_DOCUMENT_BYTES:
            raise csv.Error(TOO_LONG)
        return line


def delimiter(path: Path) -> str:
    """Return the character between the cells of a CSV file, by its name."""
    return "\t" if {".tsv", ".tab"} & {one.lower() for one in path.suffixes[-2:]} else ","


def csv_header(path: Path) -> list[str]:
    """Return the first row of a CSV file that is not blank; raise csv.Error if it is none."""
    file = CsvFile(path)
    with file.stream:
        return next(filter(None, file.rows), [])


def csv_rows(path: Path, span: Span | None, bad: BadDocuments) -> Iterator[LocatedRow]:
    """Yield the location and the content of each row of a CSV file; others are added to `bad`.

    A span is always the whole file. After a mistake in a row with quotes, nobody knows where the
    next row starts: its lines would become documents of their own. So the rest of the file is lost
    there.
    """
    file, header, size = None, None, 0
    try:
        # Not where it is needed: while damage is handled, a failure here would end the run.
        size = path.stat().st_size
        file = CsvFile(path)
        with file.stream:
            while True:
                file.quoted, file.row = False, 0
                before, where = file.used, partial(location, path, 0, file.lines + 1)
                try:
                    row = next(file.rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    if header is not None and not file.quoted:
                        bad.add(where, f"not CSV: {error}")
                        continue
                    why = f"not CSV: {error}; the rest of the file is left out"
                    rest = lost_bytes(file.stream.buffer, before, size)
                    bad.add(where, why, lost_bytes=rest)
                    return
                if not row:
                    continue
                if header is None:
                    header = row
                elif len(row) != len(header):
                    bad.add(where, f"cells: {len(row)}, but the header has {len(header)}")
                else:
                    yield where, None, dict(zip(header, row, strict=True))
    except OSError as error:
        raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        number, used = (1, 0) if file is None else (file.lines + 1, file.used)
        lost = lost_bytes(file and file.stream.buffer, used, size)
        bad.add(partial(location, path, 0, number), why, lost_bytes=lost)


def csv_columns(path: Path, wanted: str | None) -> Kinds:
    """Return the columns in the header; empty without a header.

    Raises ConfigError if another character seems to separate them. Spreadsheets write semicolons in
    many languages; the complete line would be the text.
    """
    names = [name for name in csv_header(path) if name]
    # Invalid bytes must end here, not where a name is written to a manifest.
    "".join(names).encode(errors="surrogateescape").decode()
    check_names(path, names)
    mine = delimiter(path)
    one = names[0] if len(names) == 1 and names != [wanted] else ""
    if any(other in one for other in ",;\t" if other != mine):
        raise ConfigError(
            f"the columns of a CSV file are not separated by {'commas' if mine == ',' else 'tabs'}",
            where=path,
            why=f"its first line is {one!r}",
            next="name the file .tsv, as tabs separate its columns"
            if "\t" in one
            else "write the file again with commas, or as JSON lines",
        )
    return dict.fromkeys(names, TEXT)
