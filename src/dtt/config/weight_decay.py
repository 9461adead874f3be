"""Values of weight decay: a number or a horizon, plain or cautious."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from dtt.config.base import MAX_FLOAT

FORM = re.compile(r"(?=[ch])(cautious )?(horizon )?(\d+(?:\.\d*)?(?:e-?\d+)?)")


class WeightDecay(NamedTuple):
    """A weight decay as it is configured."""

    value: float
    """The decay, or the horizon as a fraction of the run."""
    by_horizon: bool = False
    cautious: bool = False
    """True if it applies only to weights that the update moves towards zero as well, or not at all
    (Chen et al. 2025, arXiv 2510.12402)."""

    def resolve(self, lr: float, steps: int | None) -> float:
        """Return the decay for the peak learning rate `lr` in a run of `steps` steps.

        A horizon of tau is the decay 1 / (tau * lr * steps): the weights are then an exponential
        moving average of their updates over tau * steps steps (Wang & Aitchison, arXiv 2405.13698).
        Raise ValueError for a horizon if `steps` is None.
        """
        if not self.by_horizon:
            return self.value
        if steps is None:
            raise ValueError("a weight decay by horizon needs the number of steps")
        return 1.0 / (self.value * lr * steps)


def parse_decay(given: float | str) -> WeightDecay:
    """Return the decay that a number or a text stands for: `horizon 0.2`, `cautious 0.1`.

    Raise ValueError if it is neither, negative, or a horizon of 0.
    """
    if isinstance(given, str) and (found := FORM.fullmatch(given)):
        decay = WeightDecay(float(found[3]), bool(found[2]), bool(found[1]))
    elif isinstance(given, int | float) and not isinstance(given, bool):
        decay = WeightDecay(float(given))
    else:
        raise ValueError(given)
    # A horizon far below one step of any run is a decay beyond fp32.
    if not (1e-9 if decay.by_horizon else 0) <= decay.value <= MAX_FLOAT:
        raise ValueError(given)
    return decay


def _is_decay(value: Any) -> Any:
    try:
        parse_decay(value)
    except (ValueError, OverflowError):  # an int that is no float
        raise PydanticCustomError(
            "weight_decay",
            "must be a finite number of at least 0, or a horizon above 0 as a fraction of the run "
            "(horizon 0.2), and may be cautious (cautious 0.1, cautious horizon 0.2)",
        ) from None
    return value


Decayed = Annotated[float | str, BeforeValidator(_is_decay)]
"""A weight decay: a number, `horizon 0.2`, `cautious 0.1` or `cautious horizon 0.2`."""
