"""Reading metrics.jsonl for a report: only what is damaged is skipped, and no value is lost."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtt.report.metrics_history import (
    MetricsHistory,
    Series,
    bucket_width,
)

TRAIN = {"kind": "train", "step": 1, "loss": 2.0, "tokens": 64, "time": 5.0, "ledger": "00"}


def history(tmp_path: Path, *lines: str | bytes) -> MetricsHistory:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(x.encode() if isinstance(x, str) else x for x in lines))
    return MetricsHistory.read(path)


def test_damaged_lines_give_no_values(tmp_path: Path) -> None:
    lines: list[str | bytes] = [
        json.dumps(TRAIN) + "\n",
        "not JSON\n",
        b"\xff\xfe\n",
        "[1, 2]\n",
        '{"kind": "train", "step": "2", "loss": 1.0}\n',
        '{"kind": "train", "step": -2, "loss": 1.0}\n',
        '{"kind": "train", "step": 2, "loss": NaN, "lr": 1e999, "grad_norm": true}\n',
        '{"kind": "train", "step": 3, "loss": null, "grad_norm": 1' + "0" * 400 + "}\n",
    ]
    found = history(tmp_path, *lines, '{"kind": "train", "step": 4, "lo')
    assert {name: list(column.values) for name, column in found.series.items()} == {
        "train/loss": [2.0]
    }
    assert found.last_step == 3


def test_numbers_become_curves_and_everything_else_is_listed(tmp_path: Path) -> None:
    records = [
        TRAIN,
        {"kind": "eval", "step": 1, "loss": 3.0, "losses": {"a": 1.0, "b": 5}, "time": 6.0},
        {"kind": "perf", "step": 1, "tokens_per_second": 9, "seconds": {"data": 1.0}},
        {"kind": "sample", "step": 1, "text": "x"},
        {"kind": "start", "step": 0, "seconds": {"imports": 1.0}},
    ]
    found = history(tmp_path, *(json.dumps(record) + "\n" for record in records))
    assert {name: list(column.values) for name, column in found.series.items()} == {
        "train/loss": [2.0],
        "eval/loss": [3.0],
        "eval/losses/a": [1.0],
        "eval/losses/b": [5.0],
        "perf/tokens_per_second": [9.0],
    }
    assert (list(found.tokens.values), list(found.times.values)) == ([64.0], [5.0])
    assert [record["text"] for record in found.listed["sample"]] == ["x"]


# ---- curves in buckets ---------------------------------------------------------------------------


def series_of(values: dict[int, float]) -> Series:
    column = Series()
    for step, value in values.items():
        column.append(step, value)
    return column


@given(st.sets(st.integers(0, 5000), min_size=1), st.integers(1, 100))
def test_the_width_is_the_smallest_power_of_two_that_leaves_few_enough_buckets(
    steps: set[int], most: int
) -> None:
    width = bucket_width(np.array(sorted(steps)), most)
    assert width & (width - 1) == 0
    assert len({step // width for step in steps}) <= most
    assert width == 1 or len({step // (width // 2) for step in steps}) > most


@given(
    st.dictionaries(st.integers(0, 300), st.floats(-1e9, 1e9), min_size=1),
    st.sampled_from([1, 2, 8, 64]),
)
def test_buckets_in_any_order_equal_a_recount(values: dict[int, float], most: int) -> None:
    curve = series_of(values).buckets(most)
    width = curve["width"]
    inside = {
        bucket: [v for step, v in values.items() if step // width == bucket]
        for bucket in {step // width for step in values}
    }
    assert curve["at"] == sorted(inside)
    counts = [len(inside[bucket]) for bucket in curve["at"]]
    assert curve.get("n", [1] * len(counts)) == counts
    for name, expected in (("min", min), ("max", max), ("mean", mean)):
        values_of = [float(expected(inside[bucket])) for bucket in curve["at"]]
        assert curve.get(name, curve["mean"]) == pytest.approx(values_of, rel=1e-6, abs=1e-3)
    newest = [max(s for s in values if s // width == bucket) for bucket in curve["at"]]
    assert series_of(values).last(most) == [values[step] for step in newest]


def test_a_curve_without_values_is_empty() -> None:
    assert Series().buckets() == {"width": 1, "at": [], "mean": []}
    assert Series().last() == []
