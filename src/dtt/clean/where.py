"""Conditions on columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dtt.clean.filters import Removal
from dtt.config.clean import WhereConfig


class WhereFilter:
    """A judge of one column; a document without a value there does not fulfil the condition."""

    def __init__(self, condition: WhereConfig) -> None:
        """Judge by `condition`."""
        self.columns: tuple[str, ...] = (condition.column,)
        self._condition = condition
        # CSV has text only.
        self._texts = frozenset(map(str, condition.values))

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return `where` with the column and what it holds; None: the condition is fulfilled."""
        wanted, value = self._condition, row.get(self._condition.column)
        if wanted.values:
            fulfilled = (
                value in wanted.values if not isinstance(value, str) else (value in self._texts)
            )
            return None if fulfilled else Removal("where", f"{wanted.column} {_shown(value)}")
        number = _number(value)
        if number is None:
            return Removal("where", f"{wanted.column} {_shown(value)}")
        if wanted.min is not None and not number >= wanted.min:
            return Removal("where", f"{wanted.column} < {wanted.min:g}", number)
        if wanted.max is not None and not number <= wanted.max:
            return Removal("where", f"{wanted.column} > {wanted.max:g}", number)
        return None


def _number(value: Any) -> float | None:
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"
