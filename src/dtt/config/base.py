"""What every config section is: a frozen, strict, documented pydantic model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

FREE_MARK: dict[str, Any] = {"x-on-resume": "free"}


def free(default: Any) -> Any:
    """A knob that may change when a job is resumed, because it does not change what is trained."""
    return Field(default=default, json_schema_extra=FREE_MARK)


class Section(BaseModel):
    """A group of knobs. The string below each field is its documentation, in `explain` and docs."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield `(key, why)` for combinations of values that cannot work; `key` is relative."""
        return iter(())
