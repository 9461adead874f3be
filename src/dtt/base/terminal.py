"""Text for the terminal, in which text of others can neither control it nor pose as dtt's own.

Names of files, records of jobs and messages of libraries may hold escape sequences, which retitle
or clear a terminal, and line breaks, which could forge advice such as `next: …`. The streams that
`protect_output` installs escape both, so no caller has to remember it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import IO, Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except tabs and line breaks, and bytes of a name that are not UTF-8."""
IN_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]")
"""Also line breaks, tabs, and the marks that reverse the direction of what follows."""
POSING = r"([ \t]*)(?=(?:dtt|where|why|next):|(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d )"
"""The beginning of a line that looks like a part of an error message, or a log line, of dtt."""
POSING_LATER = re.compile(rf"(?<=\n){POSING}")
POSING_ANYWHERE = re.compile(rf"^{POSING}", re.MULTILINE)


class Message(str):
    """Text of dtt's own, which may have several lines; its values were made safe before."""

    __slots__ = ()

    def __str__(self) -> str:  # str() and print() would otherwise convert it to a plain string
        return self


class Verbatim(str):
    """Content that the user asked for, such as generated text: exact in a file or pipe."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


class Coded(str):
    """Text with terminal codes of dtt's own, whose values were made safe before."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


def one_line(value: object) -> str:
    """Return a value of others as one line, with escaped line breaks and other controls."""
    return IN_A_LINE.sub(_escape, str(value))


def without_controls(text: str) -> str:
    """Return text of several lines with its control characters escaped."""
    return CONTROL.sub(_escape, text)


def part_of_message(text: str) -> Message:
    """Return text for one part of a message: later lines cannot pose as further parts.

    Such a line is quoted with `| `. Text that is a `Message` is kept.
    """
    if isinstance(text, Message):
        return text
    return Message(POSING_LATER.sub(r"\1| ", without_controls(text)))


def _escape(found: re.Match[str]) -> str:
    # This form is also valid in JSON and in quoted YAML, which may be what is printed.
    return f"\\u{ord(found[0]):04x}"


class ProtectedStream:
    """A text stream that escapes what is written to it, unless it is dtt's own.

    With `may_fail`, text that cannot be written is lost instead of raising OSError: a run of weeks
    must not end because its log is on a full disk, or because nobody reads it any more.
    """

    def __init__(self, stream: IO[str], *, may_fail: bool) -> None:
        self.raw, self.may_fail = stream, may_fail

    def write(self, text: str) -> int:
        """Write text; return its length. Lines that look like dtt's advice are quoted."""
        exact = isinstance(text, Coded) or (isinstance(text, Verbatim) and not self.raw.isatty())
        safe = text if exact else without_controls(text)
        if not isinstance(text, Coded | Verbatim | Message):
            safe = POSING_ANYWHERE.sub(r"\1| ", safe)
        try:
            self._write(safe)
        except OSError:
            self._give_up()
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self.raw.write(text)
        except UnicodeEncodeError as error:  # a character that the locale lacks
            self.raw.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self.raw.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Raise the current error, or send all text to /dev/null from now on.

        The descriptor itself moves, for Python would otherwise try again at its exit.
        """
        if not self.may_fail:
            raise  # noqa: PLE0704  of the caller
        discard(self.raw.fileno())

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def discard(descriptor: int) -> None:
    """Make a file descriptor, open or not, one of /dev/null, also for child processes."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)


def protect_output(*, may_fail: bool = False) -> None:
    """Make stdout and stderr escape what is written to them.

    Without stderr a command continues; without stdout only with `may_fail`: if its result is in
    files. A stream that is closed from the start becomes /dev/null, or the next file that is opened
    would take its place, and messages of libraries would be written into it.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            discard(descriptor)
            stream = open(descriptor, "w", closefd=False)  # noqa: SIM115
        if not isinstance(stream, ProtectedStream):
            stream = ProtectedStream(stream, may_fail=name == "stderr")
            setattr(sys, name, stream)
        stream.may_fail = stream.may_fail or may_fail


def raw(stream: Any) -> Any:
    """Return the stream for a library that writes terminal codes, such as a progress bar."""
    return stream.raw if isinstance(stream, ProtectedStream) else stream
