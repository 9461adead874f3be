"""Reading metrics.jsonl for a report: what is damaged is skipped, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from dtt.report.metrics_history import MetricsHistory

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


def test_a_job_without_metrics_has_an_empty_history(tmp_path: Path) -> None:
    found = MetricsHistory.read(tmp_path / "metrics.jsonl")
    assert (found.series, found.last_step) == ({}, 0)
