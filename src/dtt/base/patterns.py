"""Regular expressions of others, of tasks and adapters, with a limit on their time.

They are those of the package `regex`, which are those of `re` and more. Some need exponential time,
for which `re` has no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import regex

MAX_LENGTH = 300
"""Maximum number of characters of a regular expression of a task."""
SECONDS = 10.0
"""Maximum time of a regular expression for one text."""
SECONDS_OF_NAME = 1.0
"""Maximum time of a regular expression for one name of a layer."""


class SlowPattern(ValueError):
    """A regular expression that takes too long; the message names it."""


def pattern_problem(pattern: str) -> str | None:
    """Return what is wrong with a regular expression, if anything."""
    if len(pattern) > MAX_LENGTH:
        return f"a regular expression has at most {MAX_LENGTH} characters"
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
        return f"is not a regular expression: {error}"
    return None


def replacement_problem(pattern: str, to: str) -> str | None:
    """Return what is wrong with the replacement of a regular expression, if anything."""
    try:
        # `to` is only read at a match, so the other alternative is one; verbose patterns may end
        # with a comment.
        regex.sub(f"(?:{pattern}\n)|", to, "")
    except (regex.error, IndexError) as error:
        return f"does not fit the regular expression: {error}"
    return None


def replace(pattern: str, to: str, text: str) -> str:
    """Return `text` with `to` instead of all matches; raise SlowPattern after SECONDS."""
    with _limited(pattern, text):
        return str(regex.sub(pattern, to, text, timeout=SECONDS))


def find(pattern: str, text: str, *, last: bool) -> str | None:
    """Return the first group of the first or last match, or all of it if there are no groups.

    Return None if nothing matches, or the group is not part of the match; raise SlowPattern after
    SECONDS.
    """
    with _limited(pattern, text):
        found = list(regex.finditer(pattern, text, timeout=SECONDS))
    if not found:
        return None
    match = found[-1 if last else 0]
    part: str | None = match[1 if match.re.groups else 0]
    return part


def match_name(pattern: str, name: str, *, whole: bool = True) -> regex.Match[str] | None:
    """Return the match of `pattern` with the name of a layer, or None.

    It is one with the `whole` name, or with its beginning. Raise SlowPattern after SECONDS_OF_NAME.
    """
    with _limited(pattern, name, SECONDS_OF_NAME):
        match = regex.fullmatch if whole else regex.match
        found: regex.Match[str] | None = match(pattern, name, timeout=SECONDS_OF_NAME)
        return found


@contextmanager
def _limited(pattern: str, text: str, seconds: float | None = None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise SlowPattern(
            f"the regular expression {pattern!r} takes more than {seconds or SECONDS:g} s "
            f"for {len(text)} characters"
        ) from None
