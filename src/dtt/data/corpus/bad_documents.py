"""A record of unusable documents: their number, the reasons and some locations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from dtt.base.errors import DamagedError, DttError

MAX_REASONS = 50
"""Maximum number of different reasons, or keys, that are counted; further ones count as others."""
OTHER, OTHER_KEYS = "other reasons", "other keys"
NUMBER = re.compile(r"\d+")
SURROGATE = re.compile("[\ud800-\udfff]")


class BadDocuments:
    """A counter of unusable documents that also keeps the locations of the first few."""

    def __init__(
        self, *, stop: bool = False, shown: int = 5, what: str = "a document cannot be read"
    ) -> None:
        """Keep the locations of the first `shown` documents.

        With `stop`, the first unusable document raises DamagedError, with `what` as its message.
        """
        self.count = self.lost_bytes = 0
        self.examples: list[str] = []
        self.reasons: Counter[str] = Counter()
        """Number of documents by reason, in which `N` replaces every number."""
        self.unread: Counter[str] = Counter()
        """Number of usable rows by key that is not used."""
        self.replaced = 0
        """Number of usable documents in which U+FFFD replaces lone surrogates."""
        self.nulls = 0
        """Number of usable rows whose tools have keys with null."""
        self._stop, self._shown, self._what = stop, shown, what

    def without_surrogates(self, text: str) -> str:
        """Return `text` with U+FFFD in place of each lone surrogate, and count the document.

        JSON can express half of a pair, which programs write that cut strings at UTF-16 units. It
        has no UTF-8; one character is not worth the document.
        """
        self.replaced += 1
        return SURROGATE.sub("\ufffd", text)

    def count_unread(self, keys: Iterable[str]) -> None:
        """Count a usable row for each of its keys that is not used."""
        for key in keys:
            _count(self.unread, key, OTHER_KEYS)

    def guard(self, where: Callable[[], str]) -> RowGuard:
        """Return a context that turns any exception raised inside into an unusable document.

        Files of others raise what nobody has thought of: dates before the year 1, keys that are not
        text, templates that recurse. One such row must cost itself, never the run.
        """
        return RowGuard(self, where)

    def add(
        self, where: Callable[[], str], why: str, *, lost_bytes: int = 0, count: int = 1
    ) -> None:
        """Record an unusable document; raise DamagedError if `stop` was set.

        `where` returns the location. It may be slow, so it is called only for documents that are
        shown. If the rest of a damaged file is lost too, `lost_bytes` is its approximate size, and
        `count` the number of lost documents, if known.
        """
        self.count += count
        self.lost_bytes += lost_bytes
        why = " ".join("".join(c if c.isprintable() else " " for c in why).split())
        # Without numbers, so that the same error in two messages counts as one.
        _count(self.reasons, NUMBER.sub("N", why), OTHER, count)
        if lost_bytes:
            why += f"; lost: about {lost_bytes:,} bytes"
        if self._stop:
            raise DamagedError(
                self._what,
                where=where(),
                why=why,
                next="fix it, or skip such documents: tokenize.on_bad_document=skip",
            )
        if len(self.examples) < self._shown:
            self.examples.append(f"{where()}: {why}")


def _count(counter: Counter[str], name: str, other: str, count: int = 1) -> None:
    """Count `name`, or `other` if there are MAX_REASONS names: rows may have keys of their own."""
    known = name in counter or len(counter) < MAX_REASONS
    counter[name if known else other] += count


class RowGuard:
    """A context that records what is raised inside as an unusable document at `where`."""

    __slots__ = ("_bad", "_where")

    def __init__(self, bad: BadDocuments, where: Callable[[], str]) -> None:
        """Record in `bad`; a class, as a generator would cost a microsecond for each row."""
        self._bad, self._where = bad, where

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Record `error` and return True, unless it says nothing about the document."""
        if not isinstance(error, Exception) or not is_about_content(error):
            return False
        self._bad.add(self._where, reason(error))
        return True


def reason(error: Exception) -> str:
    """Return the reason for an unusable document, from what reading it has raised."""
    why = getattr(error, "why", None)  # of a RefusedRow
    if isinstance(why, str):
        return why
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return "not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"cannot be read: {type(error).__name__}: {error}"


def is_about_content(error: Exception) -> bool:
    """Return True if `error` means that content is damaged or has an unknown form.

    A failing disk, network or allocation may succeed later, so it must not count as a bad document.
    I/O errors of the operating system have an errno; those of damaged content have none.
    """
    failed = isinstance(error, OSError) and error.errno is not None
    return not failed and not isinstance(error, MemoryError | DttError)


def raise_if_refused(error: Exception) -> None:
    """Re-raise `error` unless it is about the content of a file."""
    if not is_about_content(error):
        raise error
