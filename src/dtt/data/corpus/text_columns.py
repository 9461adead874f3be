"""Columns of the files of a data set, and the choice of the one that contains the text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.log import log
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.csv_rows import csv_header, csv_rows
from dtt.data.corpus.file_choice import several_datasets
from dtt.data.corpus.formats import (
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    SHOWN,
    UNREADABLE,
    delimiter,
    file_format,
    is_text,
    open_stream,
    read_line,
)
from dtt.data.corpus.json_array import elements, is_array, may_be_array
from dtt.data.corpus.parquet import rows_at_once

TEXT_COLUMNS = ("text", "content", "document", "body")
MESSAGE_COLUMNS = ("messages", "conversations")
FIRST_LINES = 100
"""Number of lines of a .jsonl file in which its columns are searched."""
JSON_KINDS = {
    str: "text", type(None): "null", dict: "an object", list: "a list",
    bool: "true or false", int: "a number", float: "a number",
}  # fmt: skip


def find_text_column(paths: Sequence[Path], asked: str | None, command: str = "") -> str:
    """Return the column of `paths` to read: `asked`, or the column that contains the text.

    Every file is checked against that column, regardless of the order of the files. A file that
    cannot be read is logged here; the reader of documents later keeps what it can of it.

    Raises ConfigError, which lists the columns, if a file lacks the column, if the column does not
    contain text, or if the text column is ambiguous; DamagedError or InputError if no file can be
    read. Their remedies start with `command`.
    """
    kinds = _kinds_of_all(paths, asked)
    found = (_choose_column(path, kind, command) for path, kind in kinds.items())
    column = asked or next(filter(None, found), None)
    if column is None:
        path, kind = next(iter(kinds.items()))
        raise _no_column(path, kind, "cannot tell which column contains the text", command)
    for path, kind in kinds.items():
        what = f"there is no column {column!r}"
        if kind and column not in kind:
            elsewhere = any(column in one for one in kinds.values())
            several = _several(kinds, column) if elsewhere else None
            raise _no_column(path, kind, what, command, several)
        if kind.get(column, NOTHING) not in (TEXT, NOTHING):
            what = f"column {column!r} does not contain text, but {kind[column]}"
            raise _no_column(path, kind, what, command)
    return column


def _several(kinds: dict[Path, Kinds], column: str) -> str:
    """Return the remedy where some files have the text in `column`, and others in another."""
    ranked = {path: [] if column in kind else _ranked(path, kind) for path, kind in kinds.items()}
    entries = [
        {"dataset": str(path), "text_column": names[0] if names else column}
        for path, names in ranked.items()
    ]
    if len({path.stem for path in kinds}) == len(kinds) == 2:
        return several_datasets(entries)
    return (
        "instead of download.dataset, download.datasets with an entry for each kind of file, which "
        "include and exclude choose, and its text_column"
    )


def column_names(path: Path) -> list[str]:
    """Return the columns of a file, or the keys in the first FIRST_LINES rows of a JSON file.

    Raises DamagedError or InputError if the file cannot be read.
    """
    return [] if file_format(path) == "txt" else list(_kinds(path, None))


def holds_conversations(paths: Sequence[Path]) -> bool:
    """Return True if the first readable file has a column of messages."""
    for path in paths:
        with suppress(DamagedError, InputError, ConfigError):
            kinds = _kinds(path, None) if file_format(path) not in (None, "txt") else {}
            return any(name in kinds and kinds[name] != TEXT for name in MESSAGE_COLUMNS)
    return False


def check_rows(paths: Sequence[Path]) -> None:
    """Check that files hold rows of columns; log those that cannot be read.

    Raises DamagedError or InputError if no file can be read.
    """
    _kinds_of_all(paths, None)


def _kinds_of_all(paths: Sequence[Path], wanted: str | None) -> dict[Path, Kinds]:
    """Return the columns of each readable file; log the others, and raise if there are only such.

    `wanted` is the column that the user asked for, if any.
    """
    kinds: dict[Path, Kinds] = {}
    unreadable: list[DamagedError | InputError] = []
    for path in paths:
        try:
            kinds[path] = _kinds(path, wanted)
        except (DamagedError, InputError) as error:
            unreadable.append(error)
    if not kinds:
        raise unreadable[0]
    for problem in unreadable[:SHOWN]:
        log.warning("%s", problem)
    if unreadable:
        log.warning("files that cannot be read: %d; tokenize skips them", len(unreadable))
    return kinds


Kinds = dict[str, str]
"""The columns of a file, by name, and the kind of their values."""
TEXT, NOTHING = "text", "null"
"""Kinds of columns: text, and only nulls in the part that was read."""


def _choose_column(path: Path, kinds: Kinds, command: str) -> str | None:
    """Return the text column; None if the column, or the file, holds only nulls so far."""
    likely = next((name for name in TEXT_COLUMNS if name in kinds), None)
    if likely is None:
        texts = [name for name, kind in kinds.items() if kind == TEXT]
        if len(texts) == 1:
            return texts[0]
        if set(kinds.values()) <= {NOTHING}:
            return None
        raise _no_column(path, kinds, "cannot tell which column contains the text", command)
    # The first likely name decides: a `body` must not replace a `text` of an unexpected kind.
    return None if kinds[likely] == NOTHING else likely


def _no_column(
    path: Path, kinds: Kinds, what: str, command: str, remedy: str | None = None
) -> ConfigError:
    texts = _ranked(path, kinds)
    if remedy is None and texts:
        remedy = f"{command}{shlex.quote(f'download.text_column={texts[0]}')}"
    elif remedy is None and any(name in kinds for name in MESSAGE_COLUMNS):
        remedy = f"{command}data.type=chat, as these rows are conversations"
    named = ", ".join(name for name in kinds if name in texts)
    return ConfigError(
        what,
        where=path,
        why=f"columns: {', '.join(kinds) or 'none'}; with text: {named or 'none'}",
        next=remedy or 'choose files with a column of text, such as lines {"text": "…"}',
    )


def _ranked(path: Path, kinds: Kinds) -> list[str]:
    """Return the columns of text, the likeliest first: long texts of several words, no ids."""
    texts = [name for name, kind in kinds.items() if kind == TEXT]
    lengths: dict[str, list[tuple[bool, int]]] = {name: [] for name in texts}
    with suppress(*UNREADABLE, InputError):  # what comes before the damage counts
        for row in _first_rows(path, texts):
            for name in texts:
                value = row.get(name)
                if isinstance(value, str):
                    lengths[name].append((len(value.split()) > 1, len(value)))

    def rank(name: str) -> tuple[bool, float]:
        found = lengths[name]
        several = 2 * sum(words for words, _ in found) > len(found)
        return several, sum(size for _, size in found) / max(len(found), 1)

    return sorted(texts, key=rank, reverse=True)


def _first_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the first rows of a file, FIRST_LINES at most, with at least these columns."""
    match file_format(path):
        case "parquet":
            with pq.ParquetFile(path, pre_buffer=False) as file:
                if file.metadata.num_row_groups:
                    few = rows_at_once(path, file, 0, tuple(columns), FIRST_LINES, 2**24)
                    batches = file.iter_batches(few, row_groups=[0], columns=columns)
                    yield from next(batches).to_pylist()
        case "csv":
            for _, row in islice(csv_rows(path, BadDocuments()), FIRST_LINES):
                yield row
        case _:
            yield from _json_objects(path)


def _kinds(path: Path, wanted: str | None) -> Kinds:
    """Return the columns of a file and the kinds of their values.

    A JSON file is read for at most FIRST_LINES lines, or until `wanted` is known to contain text.
    The result is empty for a CSV file without a header. Raises DamagedError for a damaged file, and
    InputError if there is no JSON object.
    """
    try:
        match file_format(path):
            case "parquet":
                schema = pq.read_schema(path)
                _check_names(path, schema.names)
                return {field.name: _kind(field.type) for field in schema}
            case "csv":
                names = [name for name in csv_header(path) if name]
                # Invalid bytes must end here, not where a name is written to a manifest.
                "".join(names).encode(errors="surrogateescape").decode()
                _check_names(path, names)
                if names != [wanted]:
                    _check_separator(path, names)
                return dict.fromkeys(names, TEXT)
            case _:
                return _json_kinds(path, wanted)
    except UNREADABLE as damage:
        raise_if_refused(damage)
        raise DamagedError(
            "cannot read a file of the dataset",
            where=path,
            why=str(damage).splitlines()[0],
            next="fetch or write the file again",
        ) from None


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


def _check_names(path: Path, names: list[str]) -> None:
    """Raise ConfigError if two columns have one name: a reader by name would take either."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two columns are called {twice[0]!r}",
            where=path,
            why="so it is unknown which of them holds the text",
            next="write the file again with other names",
        )


def _json_kinds(path: Path, wanted: str | None) -> Kinds:
    kinds: Kinds = {}
    try:
        for value in _json_objects(path):
            for key, inner in value.items():
                if kinds.get(key, NOTHING) == NOTHING or isinstance(inner, str):
                    kinds[key] = JSON_KINDS[type(inner)]
            if wanted is not None and kinds.get(wanted) == TEXT:
                break
    except OSError as error:
        if error.errno is not None or not kinds:
            raise
    if not kinds:
        raise InputError(
            "no JSON object at the start of the file",
            where=path,
            why=f"searched the first {FIRST_LINES} lines",
            next='check that each line is an object such as {"text": "…"}, or the file an array',
        )
    return kinds


def _kind(column: pa.DataType) -> str:
    if is_text(column):
        return TEXT
    return NOTHING if pa.types.is_null(column) else str(column)


def _json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the first FIRST_LINES lines, or elements of an array.

    Others are skipped here; the reader of documents reports them.
    """
    with open_stream(path) as stream:
        if may_be_array(path) and is_array(stream):
            with suppress(ValueError):  # what comes before the damage can be used
                for element in islice(elements(stream, MAX_DOCUMENT_BYTES), FIRST_LINES):
                    if isinstance(element.value, dict):
                        yield element.value
            return
        for number in range(FIRST_LINES):
            line, size = read_line(stream)
            if not size:
                return
            if size > MAX_DOCUMENT_BYTES:
                continue
            content = line.removeprefix(BYTE_ORDER_MARK).strip()
            # Its inner lines may be objects, too, of which most would end with a comma.
            if number == 0 and content.startswith(b"{") and not content.endswith(b"}"):
                raise InputError(
                    "a JSON object spans several lines",
                    where=path,
                    why="dtt reads an object per line, or one array of objects",
                    next=f"jq -c . {path.name} > NEW.jsonl; of a list in it: jq -c '.data[]'",
                )
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value
