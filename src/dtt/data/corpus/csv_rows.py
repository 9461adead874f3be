"""Rows of CSV files: lines of a bounded size, and no guess where a row starts after a mistake."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.columns import TEXT, Kinds, check_names
from dtt.data.corpus.compressed import lost_bytes
from dtt.data.corpus.line_numbers import location
from dtt.data.corpus.streams import (
    FIRST_ROWS,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    LocatedRow,
    open_stream,
)


class _Lines:
    """The lines of a CSV file, with what has to be known about the row that is being read."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self.number = 0
        """Number of lines read so far."""
        self.used = 0
        """Characters read so far."""
        self.quoted = False
        """True if a quote has been read since the row started."""
        self._row = 0

    def start_row(self) -> None:
        self.quoted, self._row = False, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        """Return the next line; raise csv.Error for a row of more than MAX_DOCUMENT_BYTES.

        The rest of such a line is skipped, so that memory is bounded.
        """
        line = part = self._stream.readline(MAX_DOCUMENT_BYTES)
        if not line:
            raise StopIteration
        self.number += 1
        while True:
            self.used += len(part)
            self._row += len(part)
            self.quoted |= '"' in part
            if len(part) < MAX_DOCUMENT_BYTES or part.endswith(("\n", "\r")):
                break
            part = self._stream.readline(MAX_DOCUMENT_BYTES)
        if self._row > MAX_DOCUMENT_BYTES:
            raise csv.Error(TOO_LONG)
        return line


def delimiter(path: Path) -> str:
    """Return the character between the cells of a CSV file, by its name."""
    return "\t" if {".tsv", ".tab"} & {one.lower() for one in path.suffixes[-2:]} else ","


def open_csv(path: Path) -> tuple[io.TextIOWrapper, _Lines, Iterator[list[str]]]:
    """Open a CSV file; return the stream, its lines and its rows.

    Bytes that are not UTF-8 are decoded as lone surrogates.
    """
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    stream = io.TextIOWrapper(
        open_stream(path), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    lines = _Lines(stream)
    return stream, lines, csv.reader(lines, strict=True, delimiter=delimiter(path))


def csv_header(path: Path) -> list[str]:
    """Return the first row of a CSV file that is not blank; raise csv.Error if it is none."""
    stream, _, rows = open_csv(path)
    with stream:
        return next(filter(None, rows), [])


def csv_rows(path: Path, bad: BadDocuments) -> Iterator[LocatedRow]:
    """Yield the location and the content of each row of a CSV file; others are added to `bad`.

    After a mistake in a row with quotes, nobody knows where the next row starts: its lines would
    become documents of their own. So the rest of the file is lost there.
    """
    stream, lines, header = None, None, None
    try:
        stream, lines, rows = open_csv(path)
        with stream:
            while True:
                lines.start_row()
                before, where = lines.used, partial(location, path, 0, lines.number + 1)
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    if header is not None and not lines.quoted:
                        bad.add(where, f"not CSV: {error}")
                        continue
                    why = f"not CSV: {error}; the rest of the file is left out"
                    bad.add(where, why, lost_bytes=_rest(stream, path, before))
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
        lost = lost_bytes(stream and stream.buffer)
        number = 1 if lines is None else lines.number + 1
        bad.add(partial(location, path, 0, number), why, lost_bytes=lost)


def _rest(stream: io.TextIOWrapper, path: Path, used: int) -> int:
    """Return about how many bytes of a file follow the first `used` characters of its content."""
    return max(1, lost_bytes(stream.buffer, used, path.stat().st_size))


def first_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the first FIRST_ROWS rows, with all columns."""
    for _, _, row in islice(csv_rows(path, BadDocuments()), FIRST_ROWS):
        yield row


def csv_columns(path: Path, wanted: str | None) -> Kinds:
    """Return the columns in the header; empty without a header.

    Raises ConfigError if two have one name, or another character seems to separate them.
    """
    names = [name for name in csv_header(path) if name]
    # Invalid bytes must end here, not where a name is written to a manifest.
    "".join(names).encode(errors="surrogateescape").decode()
    check_names(path, names)
    if names != [wanted]:
        _check_separator(path, names)
    return dict.fromkeys(names, TEXT)


def _check_separator(path: Path, names: list[str]) -> None:
    """Raise ConfigError if columns seem to be separated by another character.

    Spreadsheets write semicolons in many languages. Otherwise the complete line would be the text.
    """
    mine = delimiter(path)
    if len(names) == 1 and any(other in names[0] for other in ",;\t" if other != mine):
        rename = "\t" in names[0]
        raise ConfigError(
            f"the columns of a CSV file are not separated by {'commas' if mine == ',' else 'tabs'}",
            where=path,
            why=f"its first line is {names[0]!r}",
            next="name the file .tsv, as tabs separate its columns"
            if rename
            else "write the file again with commas, or as JSON lines",
        )
