"""How long a run may take: stretches of time (`6h`), and when it must have ended (`07:00`)."""

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
    """Of a stretch of time such as `6h` or `1h 30m`; ValueError if it is none, or 0."""
    total = sum(float(number) * SECONDS[unit] for number, unit in STRETCH.findall(stretch))
    if total == 0.0 or re.fullmatch(rf"({STRETCH.pattern} ?)+", stretch) is None:
        raise ValueError(stretch)
    return total


def moment(text: str, after: float) -> float:
    """The time (unix) that `07:00` or `2026-11-22 07:00` means: of a time of day the next `after`.

    In the time zone of this machine unless it names one. ValueError if it is none.
    """
    # Without its zone: the next morning may be on the other side of a change of summer time.
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
    return _checked(value, seconds, "a stretch of time: 6h, 90m, 1h 30m, 2d or 45s")


def _is_moment(value: str) -> str:
    forms = "a time of day (07:00) or a time (2026-11-22 07:00)"
    return _checked(value, lambda text: moment(text, 0.0), forms)


Stretch = Annotated[str, AfterValidator(_is_stretch)]
Moment = Annotated[str, AfterValidator(_is_moment)]
