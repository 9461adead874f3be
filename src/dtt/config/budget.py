"""Parsers of time limits: durations (`6h`) and the time by which a run has to end (`07:00`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
STRETCH = re.compile(r"(\d+(?:\.\d+)?) ?([dhms])")
TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):[0-5]\d")


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


def moment(text: str, after: float) -> float:
    """Return the Unix time of `07:00` or `2026-11-22 07:00`.

    A time of day is the next one after the Unix time `after`. Times without a time zone are in that
    of this machine. Raises ValueError if `text` is invalid.
    """
    # Naive local time: if the clocks change overnight, 07:00 tomorrow is not in exactly 24 h.
    start = datetime.fromtimestamp(after, UTC).astimezone().replace(tzinfo=None)
    if TIME_OF_DAY.fullmatch(text):
        hour, minute = map(int, text.split(":"))
        today = start.replace(hour=hour, minute=minute, second=0, microsecond=0)
        return (today if today > start else today + timedelta(days=1)).timestamp()
    return datetime.fromisoformat(text).timestamp()


def _checked(value: str, check: Callable[[str], object], forms: str) -> str:
    try:
        check(value)
    except ValueError:
        raise PydanticCustomError("time", "must be {forms}", {"forms": forms}) from None
    return value


def _is_stretch(value: str) -> str:
    return _checked(value, seconds, "a duration of at most 10000d: 6h, 90m, 1h 30m, 2d or 45s")


def _is_moment(value: str) -> str:
    forms = "a time of day (07:00) or a time (2026-11-22 07:00)"
    return _checked(value, lambda text: moment(text, 0.0), forms)


Stretch = Annotated[str, AfterValidator(_is_stretch)]
Moment = Annotated[str, AfterValidator(_is_moment)]
