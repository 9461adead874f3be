"""The interface of filters, which judge each document by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Removal(NamedTuple):
    """Why a document is removed."""

    reason: str
    """`where`, `language`, `contaminated` or `rules`; `exact` and `near` come from other passes."""
    rule: str
    """The rule and what it found, such as `gopher.min_words`, or `hellaswag 17` for a question;
    several questions are separated by commas."""
    score: float | None = None
    """The number that was compared with a limit."""


class Filter(Protocol):
    """A judge of single documents. It is made once for each process and has no state."""

    columns: tuple[str, ...]
    """Columns of the row that it reads besides the text."""

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return why a document is removed; None: it stays."""
