"""Learning-rate transfer: comparison of the best learning rates at different widths.

With muP they should be equal (Yang et al., arXiv 2203.03466, figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Optimum:
    """The best learning rate at one width."""

    lr: float
    loss: float
    bracketed: bool
    """True if higher and lower rates were tried, too; if not, the optimum may lie outside."""


def optimum(losses: Mapping[float, float]) -> Optimum:
    """Return the optimum of final losses by learning rate: the minimum of a parabola in log2(rate).

    The parabola passes through the lowest loss and its two neighbours. If one of them diverged, or
    at an end of the grid, the optimum is the lowest loss itself.
    """
    rates = sorted(losses)
    best = min(range(len(rates)), key=lambda i: losses[rates[i]])
    bracketed = 0 < best < len(rates) - 1
    around = rates[max(0, best - 1) : best + 2]
    y = [losses[rate] for rate in around]
    if not bracketed or not all(map(math.isfinite, y)):
        return Optimum(rates[best], losses[rates[best]], bracketed)
    a, b, c = np.polyfit(np.log2(around) - math.log2(rates[best]), y, 2).tolist()
    return Optimum(rates[best] * 2 ** (-b / (2 * a)), c - b * b / (4 * a), bracketed=True)


def power(optima: Mapping[int, Optimum]) -> float:
    """Return p of the fit lr ~ width^p to the best rates; `optima` are by width."""
    widths = [math.log(width) for width in optima]
    return linear_regression(widths, [math.log(one.lr) for one in optima.values()]).slope
