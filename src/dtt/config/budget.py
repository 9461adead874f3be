"""Parser of time budgets such as `6h`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
STRETCH = re.compile(r"(\d+(?:\.\d+)?) ?([dhms])")


def seconds(stretch: str) -> float:
    """Return the seconds of a duration such as `6h` or `1h 30m`; ValueError if invalid or 0.

    The limit of 10,000 days keeps the end of the run within the dates of Python and of the system.
    """
    total = sum(float(number) * SECONDS[unit] for number, unit in STRETCH.findall(stretch))
    if (
        not 0.0 < total <= 10_000 * SECONDS["d"]
        or re.fullmatch(rf"({STRETCH.pattern} ?)+", stretch) is None
    ):
        raise ValueError(stretch)
    return total


def _is_stretch(value: str) -> str:
    try:
        seconds(value)
    except ValueError:
        forms = {"forms": "a duration of at most 10000d: 6h, 90m, 1h 30m, 2d or 45s"}
        raise PydanticCustomError("time", "must be {forms}", forms) from None
    return value


Stretch = Annotated[str, AfterValidator(_is_stretch)]
