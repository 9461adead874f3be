"""Statistics of repeated training runs: paired tests, Holm, and two-level designs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtt.bench.significance import t_cdf, t_quantile

GENERATOR = "++-+++---+-"


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means with its standard error."""

    value: float
    error: float
    """Standard error."""
    freedom: int
    """Degrees of freedom of the standard error."""

    @property
    def p(self) -> float:
        """Two-sided p of the hypothesis that the true value is 0; 1 if value and error are 0."""
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * (1 - t_cdf(abs(self.value / self.error), self.freedom))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the two-sided confidence interval of Student's t."""
        half = t_quantile((1 + confidence) / 2, self.freedom) * self.error
        return self.value - half, self.value + half


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with the standard error s / sqrt(n), n - 1 degrees of freedom.

    Student, The probable error of a mean, Biometrika 6 (1908). Of paired differences, this is the
    paired t-test.
    """
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error, len(values) - 1)


def paired(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean of `values` minus `baseline`, paired by position."""
    return mean_estimate([a - b for a, b in zip(values, baseline, strict=True)])


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values adjusted for the number of tests by name.

    Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979): the
    i-th smallest of m is multiplied by m - i + 1; no adjusted value is below an earlier one.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def plackett_burman() -> list[tuple[int, ...]]:
    """Return the design of 12 rows for up to 11 factors of two levels, -1 and +1.

    Plackett & Burman, The design of optimum multifactorial experiments, Biometrika 33 (1946): the
    cyclic shifts of one row, and a last row of -1. All columns are orthogonal. An effect is
    confounded with a third of each interaction of two other factors.
    """
    signs = [1 if sign == "+" else -1 for sign in GENERATOR]
    shifts = [tuple(signs[-shift:] + signs[:-shift]) for shift in range(len(signs))]
    return [*shifts, (-1,) * len(signs)]


def main_effects(
    design: Sequence[Sequence[int]], outcomes: Sequence[Sequence[float]]
) -> list[Estimate]:
    """Return the effect of each column: mean outcome at +1 minus that at -1.

    `outcomes` has the outcomes of each row of `design`, one for each seed, the same seeds in all
    rows. The error variance is the mean square of the interaction of rows and seeds, with
    (rows - 1) * (seeds - 1) degrees of freedom: differences between seeds, common to all rows,
    cancel. The standard error of an effect is 2 s / sqrt(N), N = rows * seeds (Box, Hunter &
    Hunter, Statistics for Experimenters, 2nd ed., 2005, chapters 4 and 5).
    """
    rows, seeds = len(design), len(outcomes[0])
    by_row = [statistics.fmean(row) for row in outcomes]
    by_seed = [statistics.fmean(column) for column in zip(*outcomes, strict=True)]
    mean = statistics.fmean(by_row)
    squares = sum(
        (y - of_row - of_seed + mean) ** 2
        for row, of_row in zip(outcomes, by_row, strict=True)
        for y, of_seed in zip(row, by_seed, strict=True)
    )
    freedom = (rows - 1) * (seeds - 1)
    error = 2 * math.sqrt(squares / freedom / (rows * seeds))
    return [
        Estimate(
            2 * statistics.fmean(x * y for x, y in zip(column, by_row, strict=True)), error, freedom
        )
        for column in zip(*design, strict=True)
    ]


def crossing(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the first step at which a curve of (step, loss) is at or below `target`.

    Interpolates linearly between points; None if no point is at or below `target`.
    """
    previous: tuple[int, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if previous is None or previous[1] == loss:
                return float(step)
            before, high = previous
            return before + (step - before) * (high - target) / (high - loss)
        previous = step, loss
    return None


def value_at(curve: Sequence[tuple[int, float]], step: float) -> float:
    """Return the loss at `step` by linear interpolation; at or after the last point, its loss."""
    earlier = max((point for point in curve if point[0] <= step), default=curve[0])
    later = min((point for point in curve if point[0] > step), default=earlier)
    if earlier[0] == later[0]:
        return earlier[1]
    return earlier[1] + (later[1] - earlier[1]) * (step - earlier[0]) / (later[0] - earlier[0])
