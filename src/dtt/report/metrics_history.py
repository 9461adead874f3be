"""The content of a job's metrics.jsonl, read once, as a report needs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtt.base.reading import LARGEST_INT, Kind, fits, is_kind, parse, read_lines
from dtt.report.curves import Series
from dtt.track.base import OWN, Record

CURVES = ("train", "eval", "perf")
"""Kinds of records whose numbers become curves."""
LISTED = ("task", "sample", "guard", "save", "data", "gap")
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
