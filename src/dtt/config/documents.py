"""The base class of documents of a user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtt.config.base import Section


class Documents(Section):
    """Documents that `dtt download` reads once, into a corpus. One of your own defines `rows`."""

    type: str = "FILE.py:CLASS"
    """Its class, as `FILE.py:CLASS` from the folder of the configuration, or `MODULE:CLASS`."""

    def parts(self) -> int:
        """Return the number of parts, each of which becomes a file.

        An interrupted command continues with the next part.
        """
        return 1

    def rows(self, part: int) -> Iterator[str | Mapping[str, Any]]:
        """Yield the documents of a part (from 0), in the same order each time.

        A document is a text, or a row: names with values of JSON, such as `messages`.
        """
        raise NotImplementedError

    def version(self) -> str:
        """Return a text that changes when the documents do: then they are read again.

        They are read again as well when the keys or the file of the class change.
        """
        return ""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a section without a class."""
        if type(self) is Documents:
            yield "type", "must name a class, as FILE.py:CLASS or MODULE:CLASS"
