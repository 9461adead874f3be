"""Columns of the files of a data set, and the choice of the one that contains the text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.log import log
from dtt.data.corpus.bad_documents import raise_if_refused
from dtt.data.corpus.formats import FORMATS, file_format
from dtt.data.corpus.streams import NOTHING, TEXT, UNREADABLE, UNREADABLE_SHOWN, Kinds

TEXT_COLUMNS = ("text", "content", "document", "body")
MESSAGE_COLUMNS = ("messages", "conversations")
SEVERAL = (
    "instead of download.dataset, download.datasets with an entry for each kind of file, which "
    "include and exclude choose, and its text_column"
)
UNKNOWN = "cannot tell which column contains the text"


def find_text_column(paths: Sequence[Path], asked: str | None, command: str = "") -> str:
    """Return the column of `paths` to read: `asked`, or the column that contains the text.

    Every file is checked against that column, regardless of the order of the files. A file that
    cannot be read is logged here; the reader of documents later keeps what it can of it.

    Raises ConfigError, which lists the columns, if a file lacks the column, if the column does not
    contain text, or if the text column is ambiguous; DamagedError or InputError if no file can be
    read. Their remedies start with `command`.
    """
    kinds = columns_of_all(paths, asked)
    found = (_choose_column(path, kind, command) for path, kind in kinds.items())
    column = asked or next(filter(None, found), None)
    if column is None:
        path, kind = next(iter(kinds.items()))
        raise _no_column(path, kind, UNKNOWN, command)
    for path, kind in kinds.items():
        if kind and column not in kind:
            elsewhere = any(column in one for one in kinds.values())
            what = f"there is no column {column!r}"
            raise _no_column(path, kind, what, command, SEVERAL if elsewhere else None)
        if kind.get(column, NOTHING) not in (TEXT, NOTHING):
            what = f"column {column!r} does not contain text, but {kind[column]}"
            raise _no_column(path, kind, what, command)
    return column


def columns_of_all(paths: Sequence[Path], wanted: str | None = None) -> dict[Path, Kinds]:
    """Return the columns of each readable file; log the others.

    `wanted` is the column that the user asked for, if any. Raises DamagedError or InputError if no
    file can be read.
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
    for problem in unreadable[:UNREADABLE_SHOWN]:
        log.warning("%s", problem)
    if unreadable:
        log.warning("files that cannot be read: %d; tokenize skips them", len(unreadable))
    return kinds


def column_names(path: Path) -> list[str]:
    """Return the columns of a file, or the keys in the first FIRST_ROWS rows of a JSON file.

    Raises DamagedError or InputError if the file cannot be read.
    """
    return list(_kinds(path, None))


def holds_conversations(paths: Sequence[Path]) -> bool:
    """Return True if the first readable file has a column of messages."""
    for path in paths:
        with suppress(DamagedError, InputError, ConfigError):
            kinds = _kinds(path, None)
            return any(name in kinds and kinds[name] != TEXT for name in MESSAGE_COLUMNS)
    return False


def _choose_column(path: Path, kinds: Kinds, command: str) -> str | None:
    """Return the text column; None if the column, or the file, holds only nulls so far."""
    likely = next((name for name in TEXT_COLUMNS if name in kinds), None)
    if likely is not None:
        # The first likely name decides: a `body` must not replace a `text` of an unexpected kind.
        return None if kinds[likely] == NOTHING else likely
    texts = [name for name, kind in kinds.items() if kind == TEXT]
    if len(texts) == 1:
        return texts[0]
    if set(kinds.values()) <= {NOTHING}:
        return None
    raise _no_column(path, kinds, UNKNOWN, command)


def _no_column(
    path: Path, kinds: Kinds, what: str, command: str, remedy: str | None = None
) -> ConfigError:
    texts = [name for name, kind in kinds.items() if kind == TEXT]
    if remedy is None and texts:
        remedy = f"{command}{shlex.quote(f'download.text_column={texts[0]}')}"
        remedy += ", or another of these columns" if len(texts) > 1 else ""
    elif remedy is None and any(name in kinds for name in MESSAGE_COLUMNS):
        remedy = f"{command}data.type=chat, as these rows are conversations"
    return ConfigError(
        what,
        where=path,
        why=f"columns: {', '.join(kinds) or 'none'}; with text: {', '.join(texts) or 'none'}",
        next=remedy or 'choose files with a column of text, such as lines {"text": "…"}',
    )


def _kinds(path: Path, wanted: str | None) -> Kinds:
    """Return the columns of a file and the kinds of their values, none for plain text.

    Raises DamagedError for a damaged file, and what the format raises for unusable columns.
    """
    kind = file_format(path)
    columns = None if kind is None else FORMATS[kind].columns
    if columns is None:
        return {}
    try:
        return columns(path, wanted)
    except UNREADABLE as damage:
        raise_if_refused(damage)
        raise DamagedError(
            "cannot read a file of the dataset",
            where=path,
            why=str(damage).splitlines()[0],
            next="fetch or write the file again",
        ) from None
