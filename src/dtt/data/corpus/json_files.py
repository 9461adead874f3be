"""JSON files: an object per line, or one array of objects, as most fine-tuning sets have.

An array has no line per document, so its file is one unit of work and is read from its start, in
pieces: memory holds one piece and one element, whatever the size of the file.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.streams import (
    BYTE_ORDER_MARK,
    FIRST_ROWS,
    MAX_DOCUMENT_BYTES,
    NOTHING,
    TEXT,
    Kinds,
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
PIECE = 2**18
"""Bytes of an array that are read at once. An element that is longer doubles it, so that the time
to parse it stays proportional to its length."""
SPACE = " \t\n\r"
DELIMITERS = frozenset(SPACE + ",]")

Element = tuple[int, str, Any]
"""An element of an array: the line on which it starts, from 1, its JSON text and its value."""


def may_be_array(path: Path) -> bool:
    """Return True if `path` is a .json file, maybe compressed, by its name."""
    return ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]


def is_array(stream: io.BufferedReader) -> bool:
    """Return True if a stream of text starts with a JSON array; its position does not change."""
    return stream.peek().removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


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


class ArrayReader:
    """The elements of an array in a stream of UTF-8, and of arrays that follow it.

    `cat` joins files to such a stream, and some programs write one array per line.
    """

    def __init__(self, stream: io.BufferedReader, longest: int = MAX_DOCUMENT_BYTES) -> None:
        """Read nothing yet; an element may have `longest` characters."""
        self._stream, self._longest = stream, longest
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._ended = "", False
        self._at, self._line = 0, 1

    def __iter__(self) -> Iterator[Element]:
        """Yield the elements.

        Raises ValueError, with the line in its message, where the content is no JSON, or an element
        is too long: without knowing where it ends, nothing after it can be read. Raises OSError if
        the stream does.
        """
        while self._skip(SPACE + "\ufeff") == "[":
            self._at += 1
            separators = SPACE
            while self._skip(separators) != "]":
                yield self._element()
                separators = SPACE + ","
            self._at += 1
        if self._skip(SPACE):
            raise ValueError(f"line {self._line}: after the array comes other text")

    def _skip(self, separators: str) -> str:
        """Skip separators; return the next character, "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in separators:
                self._line += self._text[self._at] == "\n"
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _element(self) -> Element:
        value, end = None, self._at
        while True:
            try:
                value, end = self._parse(self._text, self._at)
                # `0.5` is parsed as 0 if its piece ends after the point.
                if self._ended or self._text[end : end + 1] in DELIMITERS:
                    break
            except RecursionError:
                raise ValueError(f"line {self._line}: nested too deeply") from None
            except ValueError as error:
                # The parser cannot tell an element that continues in the next piece from a mistake.
                if self._ended:
                    raise ValueError(f"line {self._line}: not JSON: {error.args[0]}") from None
            if len(self._text) - self._at > self._longest:
                size = self._longest // 2**20
                raise ValueError(f"line {self._line}: longer than {size} MiB, or not JSON")
            self._read()
        found = self._line, self._text[self._at : end], value
        self._line += self._text.count("\n", self._at, end)
        self._at = end
        return found

    def _read(self) -> None:
        """Append a piece to the text, without the part that is done with."""
        piece = self._stream.read(max(PIECE, len(self._text) - self._at))
        self._text = self._text[self._at :] + self._decode(piece, final=not piece)
        self._at, self._ended = 0, not piece


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
    line, used = 1, 0
    try:
        with open_stream(path) as stream:
            for line, text, value in ArrayReader(stream):
                where = partial("{}:{}".format, path, line)
                content = text.encode(errors="surrogatepass")
                used += len(content)
                if isinstance(value, dict):
                    yield where, content, value
                else:
                    bad.add(where, "not a JSON object")
    except (OSError, ValueError) as error:
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
                for _, _, value in islice(ArrayReader(stream), FIRST_ROWS):
                    if isinstance(value, dict):
                        yield value
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
            with suppress(ValueError, RecursionError):
                value = json.loads(content)
                if isinstance(value, dict):
                    yield value
