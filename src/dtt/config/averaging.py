"""Values of `train.ema_decay`: a decay, when the average of the weights starts, and its blend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from dtt.config.base import Length

TEXT = re.compile(r"(0\.\d+)(?: from (\d+|\d*\.\d+|\d+(?:\.\d+)? ?%))?(?: blend (\d(?:\.\d*)?))?")
"""Pattern of the text that earlier versions wrote, such as `0.999 from 60% blend 0.6`."""


class Averaging(NamedTuple):
    """An exponential moving average of the weights as it is configured."""

    decay: float
    start: Length = Length(0)
    """Part of the run before the average starts."""
    blend: float = 1.0
    """Share of the average in the weights that are evaluated and exported, above 0."""


def parse_averaging(given: float | Mapping[str, Any]) -> Averaging:
    """Return the average that a number, or a mapping of the fields of Averaging, stands for.

    Raise ValueError if it is neither, or if a number is outside of its range.
    """
    named = given if isinstance(given, Mapping) else {"decay": given}
    if named.keys() - set(Averaging._fields) or not isinstance(named.get("decay"), float):
        raise ValueError(given)
    start, blend = Length(named.get("start", 0)), named.get("blend", 1.0)
    if isinstance(blend, bool) or not isinstance(blend, int | float):
        raise ValueError(given)
    if not 0 < named["decay"] < 1 or not 0 < blend <= 1:
        raise ValueError(given)
    return Averaging(named["decay"], start, float(blend))


def _averaging(value: Any) -> Any:
    if isinstance(value, str) and (found := TEXT.fullmatch(value)) and any(found.groups()[1:]):
        start = found[2] if found[2] is None or found[2].endswith("%") else _number(found[2])
        given = {"decay": float(found[1]), "start": start, "blend": found[3] and float(found[3])}
        value = {name: one for name, one in given.items() if one is not None}
    try:
        parse_averaging(value)
    except ValueError:
        raise PydanticCustomError(
            "ema_decay",
            "must be a number above 0 and below 1 (0.999), or names and values, of which start and "
            "blend, above 0, may be left out ({decay: 0.999, start: 60%, blend: 0.6})",
        ) from None
    return value


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


Averaged = Annotated[float | dict[str, int | float | str], BeforeValidator(_averaging)]
"""A decay of the average of the weights, such as 0.999, or names and values."""
