"""Values of `train.ema_decay`: a decay, when the average of the weights starts, and its blend."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from dtt.config.base import Length

FORM = re.compile(r"(0\.\d+)(?: from (\d+|\d*\.\d+|\d+(?:\.\d+)? ?%))?(?: blend (\d(?:\.\d*)?))?")


class Averaging(NamedTuple):
    """An exponential moving average of the weights as it is configured."""

    decay: float
    start: Length = Length(0)
    """Part of the run before the average starts."""
    blend: float = 1.0
    """Share of the average in the weights that are evaluated and exported, above 0."""


def parse_averaging(given: float | str) -> Averaging:
    """Return the average that a number or a text, such as `0.999 from 60% blend 0.6`, stands for.

    Raise ValueError if it is neither, or if a number is outside of its range.
    """
    if isinstance(given, str):
        found = FORM.fullmatch(given)
        if found is None or (found[2] is None and found[3] is None):
            raise ValueError(given)
        averaging = Averaging(float(found[1]), _length(found[2] or "0"), float(found[3] or 1))
    elif isinstance(given, float):
        averaging = Averaging(given)
    else:
        raise ValueError(given)
    if not 0 < averaging.decay < 1 or not 0 < averaging.blend <= 1:
        raise ValueError(given)
    return averaging


def _length(text: str) -> Length:
    """Return the length that `text` stands for: a number or a percentage."""
    if text.isdigit():
        return Length(int(text))
    return Length(text if text.endswith("%") else float(text))


def _is_averaging(value: Any) -> Any:
    try:
        parse_averaging(value)
    except ValueError:
        raise PydanticCustomError(
            "ema_decay",
            "must be a number above 0 and below 1 (0.999), which may be followed by a start and a "
            "blend above 0 (0.999 from 60% blend 0.6)",
        ) from None
    return value


Averaged = Annotated[float | str, BeforeValidator(_is_averaging)]
"""A decay of the average of the weights, such as 0.999 or `0.999 from 60% blend 0.6`."""
