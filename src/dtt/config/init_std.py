"""Standard deviations of initial weights: one number, or a number by role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

DEFAULT_STD = 0.02


class InitialStd(NamedTuple):
    """The standard deviation of the initial weights of each role."""

    matrix: float = DEFAULT_STD
    """Hidden matrices."""
    embed: float = DEFAULT_STD
    """Token and position embeddings."""
    head: float = DEFAULT_STD
    """The output head, unless it is tied to the embedding."""
    output: float | None = None
    """Matrices that write into the residual stream; None: `matrix` / sqrt(2 * n_layers)."""

    @classmethod
    def uniform(cls, std: float) -> InitialStd:
        """Return the same standard deviation for all roles."""
        return cls(std, std, std)


def parse_std(given: float | Mapping[str, float]) -> InitialStd:
    """Return the standard deviations that a number, or a mapping of roles to numbers, stands for.

    Roles that the mapping does not name have that of `matrix`. Raise ValueError for other values:
    `output` and `head` may be 0, from which they still get gradients.
    """
    by_role: Mapping[str, Any] = given if isinstance(given, Mapping) else {"matrix": given}
    for role, std in by_role.items():
        number = isinstance(std, int | float) and not isinstance(std, bool) and math.isfinite(std)
        if role not in InitialStd._fields or not number:
            raise ValueError(role)
        if std < 0 or (std == 0 and role not in ("output", "head")):
            raise ValueError(role)
    matrix = float(by_role.get("matrix", DEFAULT_STD))
    numbers = {role: float(std) for role, std in by_role.items()}
    return InitialStd(**{"matrix": matrix, "embed": matrix, "head": matrix} | numbers)


def _is_std(value: Any) -> Any:
    try:
        parse_std(value)
    except (ValueError, TypeError, OverflowError):
        raise PydanticCustomError(
            "init_std",
            "must be a number above 0, or a number for some of the roles matrix, embed, head and "
            "output, of which head and output may be 0 ({matrix: 0.02, output: 0})",
        ) from None
    return value


Std = Annotated[float | dict[str, float], BeforeValidator(_is_std)]
"""Standard deviations: a number, or a number by role, such as `{embed: 1.0, output: 0}`."""
