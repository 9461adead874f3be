"""Curves for plots: minimum, mean and maximum of a metric in buckets of steps.

A plot has room for about two thousand points. Sampling a longer curve would hide spikes, so each
bucket of consecutive steps keeps its extremes. The width of a bucket is a power of two, so that the
buckets of a growing curve rarely change.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BUCKETS = 2000
DIGITS = 7
"""Significant digits of the numbers on a page: more than a plot or a reader can resolve."""

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


def bucket_width(steps: Steps, most: int = MAX_BUCKETS) -> int:
    """Return the smallest power of two for which at most `most` buckets contain a step.

    `steps` are in ascending order. So a curve with few values, such as the validation loss, keeps
    each of them.
    """
    width = 1
    # Steps may have gaps, so occupied buckets are counted, not the range.
    while len(steps) > most and 1 + np.count_nonzero(np.diff(steps // width)) > most:
        width *= 2
    return width


@dataclass
class Series:
    """The values of one metric, in the order in which they were recorded."""

    # Arrays of 8 bytes each: a list of Python numbers would take four times the memory for a
    # million steps.
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        """Add a value."""
        self.steps.append(step)
        self.values.append(value)

    def buckets(self, most: int = MAX_BUCKETS) -> dict[str, Any]:
        """Return the curve as JSON: bucket i covers the steps i · width … (i + 1) · width - 1.

        `at` are the indices of the buckets that are not empty, `most` at most; `n`, `mean`, `min`
        and `max` have one number for each of them. If no bucket has more than one value, there is
        only `mean`.
        """
        steps, values = self._sorted()
        width = bucket_width(steps, most)
        index = steps // width
        # True marks the first step; where the index changes, a bucket begins.
        first = np.flatnonzero(np.append(True, index[1:] != index[:-1])[: len(index)])
        counts = np.diff(np.append(first, len(index)))
        curve: dict[str, Any] = {"width": width, "at": index[first].tolist()}
        if not len(first):
            return curve | {"mean": []}
        curve["mean"] = rounded(np.add.reduceat(values, first) / counts)
        # With one value per bucket, minimum and maximum repeat the mean and would triple the page.
        if counts.max() > 1:
            curve["n"] = counts.tolist()
            curve["min"] = rounded(np.minimum.reduceat(values, first))
            curve["max"] = rounded(np.maximum.reduceat(values, first))
        return curve

    def last(self, most: int = MAX_BUCKETS) -> list[float]:
        """Return the last value of each bucket: of the tokens so far, those at its end."""
        steps, values = self._sorted()
        index = steps // bucket_width(steps, most)
        ends = np.append(index[1:] != index[:-1], True)[: len(index)]
        return [float(value) for value in values[ends]]

    def _sorted(self) -> tuple[Steps, Floats]:
        # Views of the arrays, without a copy.
        steps = np.frombuffer(self.steps, dtype=np.int64)
        values = np.frombuffer(self.values, dtype=np.float64)
        if np.any(steps[1:] < steps[:-1]):  # steps only grow, except in a file that was edited
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values


def rounded(values: Floats) -> list[float]:
    """Return numbers with the digits that a page shows."""
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
