"""What every config section is: a frozen, strict, documented pydantic model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

FREE_MARK: dict[str, Any] = {"x-on-resume": "free"}


def free(default: Any) -> Any:
    """A knob that may change when a job is resumed, because it does not change what is trained."""
    return Field(default=default, json_schema_extra=FREE_MARK)


class Section(BaseModel):
    """A group of knobs. The string below each field is its documentation, in `explain` and docs."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield `(key, why)` for combinations of values that cannot work; `key` is relative."""
        return iter(())


Unit = Literal["steps", "share", "tokens"]
TOKENS = re.compile(r"(\d+(?:\.\d+)?) ?([kKMBT]?) ?tokens?")
"""`50M tokens`, `1.5 B tokens`."""
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def measure(length: int | float | str) -> tuple[Unit, Fraction]:
    """What a `Length` counts in, and how many; exactly the decimals as they are written.

    ValueError if it is none.
    """
    if isinstance(length, int) and not isinstance(length, bool) and length >= 0:
        return "steps", Fraction(length)
    if isinstance(length, float) and 0.0 <= length <= 1.0:
        return "share", Fraction(str(length))
    if isinstance(length, str):
        if found := TOKENS.fullmatch(length):
            return "tokens", Fraction(found[1]) * SUFFIXES[found[2]]
        if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", length):
            share = Fraction(found[1]) / 100
            if share <= 1:
                return "share", share
    raise ValueError(length)


def _is_length(value: Any) -> Any:
    try:
        measure(value)
    except ValueError:
        raise PydanticCustomError(
            "length", "must be steps (500), a share of the run (0.2, 20%) or tokens (50M tokens)"
        ) from None
    return value


Length = Annotated[int | float | str, BeforeValidator(_is_length)]
"""A stretch of the run: an integer of steps, a share of all steps (`0.2`, `20%`), or `50M tokens`.
"""
