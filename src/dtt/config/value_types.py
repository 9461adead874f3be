"""Values with forms of their own: initial deviations, weight decay, durations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from dtt.config.base import MAX_FLOAT

DEFAULT_STD = 0.02
SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
STRETCH = re.compile(r"(\d+(?:\.\d+)?) ?([dhms])")


def _checked(parse: Callable[[Any], object], what: str) -> BeforeValidator:
    """Return a validator of values that `parse` takes; `what` says what they must be.

    The value stays as it was written, so that a job records what its user knows.
    """

    def check(value: Any) -> Any:
        try:
            parse(value)
        except (ValueError, TypeError, OverflowError):  # the last for an int that is no float
            raise PydanticCustomError("form", "must be {what}", {"what": what}) from None
        return value

    return BeforeValidator(check)


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


Std = Annotated[
    float | dict[str, float],
    _checked(
        parse_std,
        "a number above 0, or a number for some of the roles matrix, embed, head and output, of "
        "which head and output may be 0 ({matrix: 0.02, output: 0})",
    ),
]
"""Standard deviations: a number, or a number by role, such as `{embed: 1.0, output: 0}`."""


class WeightDecay(NamedTuple):
    """A weight decay as it is configured."""

    value: float
    """The decay, or the horizon as a fraction of the run."""
    horizon: bool = False
    cautious: bool = False
    """True if it applies only to weights that the update moves towards zero as well, or not at all
    (Chen et al. 2025, arXiv 2510.12402)."""

    def resolve(self, lr: float, steps: int | None) -> float:
        """Return the decay for the peak learning rate `lr` in a run of `steps` steps.

        A horizon of tau is the decay 1 / (tau * lr * steps): the weights are then an exponential
        moving average of their updates over tau * steps steps (Wang & Aitchison, arXiv 2405.13698).
        Raise ValueError for a horizon if `steps` is None.
        """
        if not self.horizon:
            return self.value
        if steps is None:
            raise ValueError("a weight decay by horizon needs the number of steps")
        return 1.0 / (self.value * lr * steps)


def parse_decay(given: float | Mapping[str, Any]) -> WeightDecay:
    """Return the decay that a number, or a mapping of the fields of WeightDecay, stands for.

    Raise ValueError if it is neither, negative, or a horizon of 0.
    """
    named = given if isinstance(given, Mapping) else {"value": given}
    value, horizon, cautious = (named.get(name, False) for name in WeightDecay._fields)
    if named.keys() - {*WeightDecay._fields} or type(value) not in (int, float):
        raise ValueError(given)
    if not isinstance(horizon, bool) or not isinstance(cautious, bool):
        raise ValueError(given)
    # A horizon far below one step of any run is a decay beyond fp32.
    if not (1e-9 if horizon else 0) <= value <= MAX_FLOAT:
        raise ValueError(given)
    return WeightDecay(float(value), horizon, cautious)


Decayed = Annotated[
    float | dict[str, float | bool],
    _checked(
        parse_decay,
        "a finite number of at least 0, or names and values: {value: 0.1, cautious: true}, or "
        "{value: 0.2, horizon: true} for a horizon above 0 as a fraction of the run",
    ),
]
"""A weight decay: a number, or names and values, such as `{value: 0.2, horizon: true}`."""


def seconds(stretch: str) -> float:
    """Return the seconds of a duration such as `6h` or `1h 30m`; ValueError if invalid or 0.

    The limit of 10,000 days keeps the end of the run within the dates of Python and of the system.
    """
    total = sum(float(number) * SECONDS[unit] for number, unit in STRETCH.findall(stretch))
    whole = re.fullmatch(rf"({STRETCH.pattern} ?)+", stretch)
    if whole is None or not 0.0 < total <= 10_000 * SECONDS["d"]:
        raise ValueError(stretch)
    return total


Stretch = Annotated[
    str, _checked(seconds, "a duration of at most 10000d: 6h, 90m, 1h 30m, 2d or 45s")
]
