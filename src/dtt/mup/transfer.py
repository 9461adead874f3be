"""Learning-rate transfer: comparison of the best learning rates at different widths.

With muP they should be equal (Yang et al., arXiv 2203.03466, figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtt.config.base import Section
from dtt.config.optim import Optimizer
from dtt.config.run import RunConfig
from dtt.mesh.dist import World
from dtt.mup.short_training import ShortTraining, at_width

LAST = 0.1
"""Fraction of the steps, at the end of the run, whose mean loss is the final loss."""


def final_loss(cfg: RunConfig, width: int, lr: float, world: World) -> float:
    """Train the run at a width with the peak rate `lr`; return its final loss in nats per token.

    The loss is infinite if the run diverges.
    """
    optim = with_rate(cfg.optim, lr)
    training = ShortTraining(at_width(cfg.model_copy(update={"optim": optim}), width), world)
    losses = torch.stack(list(training.losses(training.scheduled, training.scheduled_own)))
    loss = losses[-max(1, round(LAST * len(losses))) :].mean().item()
    return loss if math.isfinite(loss) else math.inf


def with_rate(optim: Optimizer, lr: float) -> Optimizer:
    """Return the settings with the peak rate `lr`; all other rates keep their proportion to it.

    A weight decay by horizon then follows its rate, as in a run with these settings.
    """
    scaled: Optimizer = _scaled(optim, lr / optim.lr)
    return scaled.model_copy(update={"lr": lr})


def _scaled(value: Any, factor: float) -> Any:
    """Return a value of the configuration with the keys `lr` below it multiplied by `factor`."""
    if isinstance(value, tuple):
        return tuple(_scaled(one, factor) for one in value)
    if not isinstance(value, Section):
        return value
    found = {name: _scaled(getattr(value, name), factor) for name in type(value).model_fields}
    if found.get("lr") is not None:
        found["lr"] *= factor
    return value.model_copy(update=found)


def drift(best: Mapping[int, float], tried: Sequence[float]) -> list[str]:
    """Return why the best rates by width depend on the width; nothing if they do not.

    A rate next to the best one of another width is no drift: the true optimum lies between two.
    """
    places = [tried.index(rate) for rate in best.values()]
    faults = [
        f"the best learning rate at width {width} is at the end of the grid"
        for width, place in zip(best, places, strict=True)
        if place in (0, len(tried) - 1)
    ]
    if (steps := max(places) - min(places)) > 1:
        faults.append(f"the best learning rates are {steps} places of the grid apart")
    return faults
