"""Files that contain one JSON array, as most fine-tuning sets do (alpaca, LLaMA-Factory).

Such a file has no line per document, so it is one unit of work and is read from its start. It is
read in pieces: memory holds one piece and one element, whatever the size of the file.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PIECE = 2**18
"""Bytes that are read at once. An element that is longer doubles it, so that the time to parse it
stays proportional to its length."""
SPACE = " \t\n\r"
DELIMITERS = frozenset(SPACE + ",]")
BYTE_ORDER_MARK = "\ufeff"


class Element(NamedTuple):
    """One element of an array."""

    line: int
    """Line on which it starts, from 1."""
    text: str
    """JSON text of the element."""
    value: Any


def may_be_array(path: Path) -> bool:
    """Return True if `path` is a .json file, maybe compressed, by its name."""
    return ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]


def is_array(stream: io.BufferedReader) -> bool:
    """Return True if a stream of text starts with a JSON array; its position does not change."""
    start = stream.peek().removeprefix(codecs.BOM_UTF8).lstrip()
    return start.startswith(b"[")


def elements(stream: io.BufferedReader, longest: int) -> Iterator[Element]:
    """Yield the elements of the array in a stream of UTF-8, and of arrays that follow it.

    `cat` joins files to such a stream, and some programs write one array per line.

    Raises ValueError, with the line in its message, where the content is no JSON, or an element has
    more than `longest` characters: without knowing where it ends, nothing after it can be read.
    Raises OSError if the stream does.
    """
    text = _Pieces(stream, longest)
    while text.skip(SPACE + BYTE_ORDER_MARK) == "[":
        text.at += 1
        separators = SPACE
        while text.skip(separators) != "]":
            yield text.element()
            separators = SPACE + ","
        text.at += 1
    if text.skip(SPACE):
        raise ValueError(f"line {text.line}: after the array comes other text")


class _Pieces:
    """The decoded part of a stream that is not parsed yet."""

    def __init__(self, stream: io.BufferedReader, longest: int) -> None:
        self._stream, self._longest = stream, longest
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._ended = "", False
        self.at, self.line = 0, 1

    def skip(self, separators: str) -> str:
        """Skip separators; return the next character, "" at the end."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in separators:
                self.line += self._text[self.at] == "\n"
                self.at += 1
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._read()

    def element(self) -> Element:
        """Parse and return the next element."""
        value, end = None, self.at
        while True:
            try:
                value, end = self._parse(self._text, self.at)
            except RecursionError:
                raise ValueError(f"line {self.line}: nested too deeply") from None
            except ValueError as error:
                # The parser cannot tell an element that continues in the next piece from a mistake.
                if self._ended:
                    raise ValueError(f"line {self.line}: not JSON: {error.args[0]}") from None
            else:
                # `0.5` is parsed as 0 if its piece ends after the point.
                if self._ended or self._text[end : end + 1] in DELIMITERS:
                    break
            if len(self._text) - self.at > self._longest:
                size = self._longest // 2**20
                raise ValueError(f"line {self.line}: longer than {size} MiB, or not JSON")
            self._read()
        found = Element(self.line, self._text[self.at : end], value)
        self.line += self._text.count("\n", self.at, end)
        self.at = end
        return found

    def _read(self) -> None:
        """Append a piece to the text, without the part that is done with."""
        piece = self._stream.read(max(PIECE, len(self._text) - self.at))
        self._text = self._text[self.at :] + self._decode(piece, final=not piece)
        self.at, self._ended = 0, not piece
