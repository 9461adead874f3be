"""JSON files: an object per line, or one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.columns import NOTHING, TEXT, Kinds
from dtt.data.corpus.json_array import elements, is_array, may_be_array
from dtt.data.corpus.streams import (
    BYTE_ORDER_MARK,
    FIRST_ROWS,
    MAX_DOCUMENT_BYTES,
    LocatedRow,
    Span,
    open_stream,
    raw_lines,
    read_line,
)

JSON_KINDS = {
    str: "text", type(None): "null", dict: "an object", list: "a list",
    bool: "true or false", int: "a number", float: "a number",
}  # fmt: skip


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


def json_objects(path: Path, span: Span, bad: BadDocuments) -> Iterator[LocatedRow]:
    """Yield the location, the bytes and the content of each line that is a JSON object.

    Other lines are recorded in `bad`, except for blank ones. If the file is a JSON array, its
    elements take the place of lines.
    """
    if span.start == 0 and starts_with_array(path):
        yield from _array_objects(path, span, bad)
        return
    for where, line in raw_lines(path, span, bad):
        if line.isspace():
            continue
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            bad.add(where, f"not UTF-8: byte {error.start} is 0x{line[error.start]:02x}")
        except ValueError as error:
            bad.add(where, f"not JSON: {error}")
        except RecursionError:
            bad.add(where, "invalid JSON: nested too deeply")
        else:
            if isinstance(value, dict):
                yield where, line, value
            else:
                bad.add(where, "not a JSON object")


def _array_objects(path: Path, span: Span, bad: BadDocuments) -> Iterator[LocatedRow]:
    stream, line, used = None, 1, 0
    try:
        with open_stream(path) as stream:
            for line, text, value in elements(stream, MAX_DOCUMENT_BYTES):
                where = partial("{}:{}".format, path, line)
                content = text.encode(errors="surrogatepass")
                used += len(content)
                if isinstance(value, dict):
                    yield where, content, value
                else:
                    bad.add(where, "not a JSON object")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise_if_refused(error)
        why = f"the rest of the file cannot be read: {error}"
        bad.add(partial("{}:{}".format, path, line), why, lost_bytes=max(span.stop - used, 1))


def json_columns(path: Path, wanted: str | None) -> Kinds:
    """Return the keys in the first FIRST_ROWS lines, or until `wanted` is known to contain text.

    Raises InputError if there is no JSON object.
    """
    kinds: Kinds = {}
    try:
        for value in first_objects(path):
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
            why=f"searched the first {FIRST_ROWS} lines",
            next='check that each line is an object such as {"text": "…"}, or the file an array',
        )
    return kinds


def first_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the first FIRST_ROWS lines, or elements of an array.

    Others are skipped here; the reader of documents reports them.
    """
    with open_stream(path) as stream:
        if may_be_array(path) and is_array(stream):
            with suppress(ValueError):  # what comes before the damage can be used
                for element in islice(elements(stream, MAX_DOCUMENT_BYTES), FIRST_ROWS):
                    if isinstance(element.value, dict):
                        yield element.value
            return
        for number in range(FIRST_ROWS):
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
