"""Rows of the histories of W&B runs: their comparison, and what the client encodes in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

Row = dict[str, Any]

LIVE_SECONDS = 1.0
"""Maximum difference in seconds between the time of a record in metrics.jsonl and that of its row
in a run that `WandbTracker` wrote while the job ran."""


class RunPath(NamedTuple):
    """The place of a run on a W&B server."""

    entity: str
    project: str
    id: str

    def __str__(self) -> str:
        """Return `entity/project/id`."""
        return "/".join(self)

    @property
    def folder(self) -> str:
        """The project with its entity."""
        return f"{self.entity}/{self.project}"


@dataclass(frozen=True)
class StoredRun:
    """A run on the server, as far as it shows which rows its history has."""

    path: RunPath
    rows: int
    summary: Row
    """The last value of each metric."""
    url: str
    uploaded: bool
    """True if an upload created it; False if a tracker did."""


def matches(run: StoredRun, row: Row, found: Row) -> bool:
    """Return True if `found`, the last values of a run, are those of `row` as its last row."""
    expected = {"_step": run.rows - 1} | row
    expected.pop("_runtime", None)  # seconds since the client started, which is another one here
    timestamp, logged = expected.pop("_timestamp", None), found.get("_timestamp")
    tolerance = 0.0 if run.uploaded else LIVE_SECONDS
    if timestamp is not None and logged is not None and abs(timestamp - logged) > tolerance:
        return False
    return contains(found, expected)


def contains(found: Row, expected: Row) -> bool:
    """Return True if `found` has the expected values; two NaN are equal here."""

    def same(one: Any, other: Any) -> bool:
        both_nan = one != one and other != other
        return both_nan or bool(one == other)

    return all(same(found.get(name), value) for name, value in expected.items())


def numbers(row: Row) -> Row:
    """Return the row with numbers for the strings by which servers return NaN and infinity."""
    values = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    return {k: values.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def is_media(value: Any) -> bool:
    """Return True if a value of a row names files of the run, such as images or tables."""
    return (
        isinstance(value, dict) and "_type" in value and ("path" in value or "filenames" in value)
    )


def axes(metrics: list[Any]) -> tuple[dict[str, Any], ...]:
    """Return the arguments of `define_metric` that made the client write these definitions.

    The client numbers the fields of its message MetricRecord: 1 is the name, 2 the name with a *,
    5 the position of the axis in the list, from 1 on, and 6 has 2 for a hidden metric.
    """
    return tuple(
        {
            "name": metric.get("1") or metric["2"],
            "step_metric": metrics[metric["5"] - 1].get("1") if "5" in metric else None,
            "hidden": 2 in metric.get("6", []),
        }
        for metric in metrics
    )
