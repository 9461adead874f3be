"""Values of weight decay: a number, or names and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from dtt.config.base import MAX_FLOAT

TEXT = re.compile(r"(?=[ch])(cautious )?(horizon )?(\d+(?:\.\d*)?(?:e-?\d+)?)")
"""Pattern of the text that earlier versions wrote, such as `cautious horizon 0.2`."""


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


def _decay(value: Any) -> Any:
    if isinstance(value, str) and (found := TEXT.fullmatch(value)):
        flags = {"cautious": found[1], "horizon": found[2]}
        value = {"value": float(found[3])} | {name: True for name, said in flags.items() if said}
    try:
        parse_decay(value)
    except (ValueError, OverflowError):  # an int that is no float
        raise PydanticCustomError(
            "weight_decay",
            "must be a finite number of at least 0, or names and values: {value: 0.1, cautious: "
            "true}, or {value: 0.2, horizon: true} for a horizon above 0 as a fraction of the run",
        ) from None
    return value


Decayed = Annotated[float | dict[str, float | bool], BeforeValidator(_decay)]
"""A weight decay: a number, or names and values, such as `{value: 0.2, horizon: true}`."""
