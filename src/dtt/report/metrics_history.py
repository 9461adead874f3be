"""The content of a job's metrics.jsonl, read once, as a report needs it: curves and a few records.

A plot has room for about two thousand points. Sampling a longer curve would hide spikes, so each
bucket of consecutive steps keeps its extremes. The width of a bucket is a power of two, so that the
buckets of a growing curve rarely change.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.base.reading import LARGEST_INT, Kind, fits, is_kind, parse, read_lines
from dtt.track.base import OWN, Record

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


CURVES = ("train", "eval", "perf")
"""Kinds of records whose numbers become curves."""
LISTED = ("task", "sample", "guard", "save", "data")
"""Kinds of records that a report lists; there are few of them."""
NOT_CURVES = {"step", "time", "tokens", "steps", "slowest_rank"}
NESTED = ("losses", "expert_violation", "expert_entropy", "expert_idle")
"""Fields with a number for each source, as in `eval` records, or for each layer."""
LARGEST = 1e300
"""A number that can be plotted is smaller. json reads 1e999 as infinity."""
PROGRESS: Mapping[str, Kind] = {"tokens": float, "time": float}


@dataclass
class MetricsHistory:
    """The records of a run: columns of numbers, and the few records that are listed."""

    tokens: Series = field(default_factory=Series)
    """Target tokens trained on, by step."""
    times: Series = field(default_factory=Series)
    """Time at which the record of a step was written, in Unix seconds."""
    listed: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    last_step: int = 0
    _columns: dict[str, dict[str, Series]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Series))
    )

    @classmethod
    def read(cls, path: Path) -> MetricsHistory:
        """Read a file; an empty history if it does not exist. Skips lines that are no records."""
        history = cls()
        for _, line in read_lines(path):
            try:
                record = parse(line)
            except ValueError:
                continue
            if is_record(record):
                history.add(record)
        return history

    def add(self, record: Record) -> None:
        """Add one record."""
        kind, step = record["kind"], record["step"]
        if kind in CURVES or kind.startswith(OWN):
            self.last_step = max(self.last_step, step)
            self._add_numbers(self._columns[kind], step, record)
            if kind == "train" and fits(record, PROGRESS):
                self.tokens.append(step, record["tokens"])
                self.times.append(step, record["time"])
        elif kind in LISTED:
            self.listed[kind].append(record)

    def _add_numbers(self, columns: dict[str, Series], step: int, record: Record) -> None:
        for name, value in record.items():
            kind = type(value)  # a loop over millions of values: isinstance would be slower
            if kind is float or kind is int:
                if name not in NOT_CURVES and -LARGEST < value < LARGEST:
                    columns[name].append(step, value)
            elif kind is dict and name in NESTED:
                for inner, number in value.items():
                    if is_kind(number, float):
                        columns[f"{name}/{inner}"].append(step, number)

    @property
    def series(self) -> dict[str, Series]:
        """Numbers by `kind/name` or `kind/name/inner`."""
        return {
            f"{kind}/{name}": column
            for kind, columns in self._columns.items()
            for name, column in columns.items()
        }


def is_record(value: Any) -> bool:
    """Return True for an object with a kind and a step."""
    return (  # as `fits` would, but faster: there may be millions of lines
        type(value) is dict
        and type(value.get("kind")) is str
        and type(value.get("step")) is int
        and 0 <= value["step"] < LARGEST_INT
    )
