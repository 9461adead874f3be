"""Whether the best learning rate is the same at all widths: what muP is for.

Yang et al., arXiv 2203.03466, figure 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression

import numpy as np
import torch

from dtt.config.run import RunConfig
from dtt.runtime.dist import World
from dtt.train.probe import Probe, at_width

LAST = 0.1
"""Share of the steps whose mean loss is the final one."""


def final_loss(cfg: RunConfig, width: int, lr: float, world: World) -> float:
    """Train the run at a width and with the peak rate `lr`; infinite if it diverges.

    All other rates of `cfg.optim` keep their proportion to `optim.lr`. In nats per token.
    """
    probe = Probe(at_width(cfg, width), world)
    factor = lr / cfg.optim.lr
    losses = torch.stack(list(probe.losses(lambda step: factor * probe.scheduled(step))))
    loss = losses[-max(1, round(LAST * len(losses))) :].mean().item()
    return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Optimum:
    """The best learning rate at one width."""

    lr: float
    loss: float
    bracketed: bool
    """Whether higher and lower rates were tried, too; if not, the best may lie further out."""


def optimum(losses: Mapping[float, float]) -> Optimum:
    """Of final losses by learning rate: the lowest point of a parabola over log2(rate).

    It goes through the lowest loss and its neighbours; where one of them diverged, or at the end of
    the grid, it is the lowest loss itself.
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


def drift(optima: Mapping[int, Optimum]) -> float:
    """Octaves between the lowest and the highest of the best rates."""
    rates = [one.lr for one in optima.values()]
    return math.log2(max(rates) / min(rates))


def power(optima: Mapping[int, Optimum]) -> float:
    """The p of width^p, as which the best rate goes; `optima` are by width."""
    widths = [math.log(width) for width in optima]
    return linear_regression(widths, [math.log(one.lr) for one in optima.values()]).slope
