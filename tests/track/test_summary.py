"""The closing figures are those of the record."""

from __future__ import annotations

import json
from pathlib import Path

from dtt.track.jsonl import RunSummary, summarize


def test_first_last_and_median_are_taken(tmp_path: Path) -> None:
    records = [
        {"kind": "eval", "step": 0, "loss": 5.0, "bits_per_byte": 2.0},
        {"kind": "sample", "step": 0, "text": "x\0"},
        {"kind": "train", "step": 1, "loss": 4.5, "tokens": 64},
        {"kind": "perf", "step": 1, "tokens_per_second": 10.0},
        {"kind": "perf", "step": 2, "tokens_per_second": 1000.0},
        {"kind": "perf", "step": 3, "tokens_per_second": 30.0},
        {"kind": "train", "step": 3, "loss": 4.0, "tokens": 192},
        {"kind": "eval", "step": 2, "loss": 4.8, "bits_per_byte": 1.9},
        {"kind": "eval", "step": 3, "loss": 4.1, "bits_per_byte": 1.7},
        {"kind": "sample", "step": 3, "text": "yy"},
        {"kind": "task", "step": 0, "task": "piqa", "acc": 0.5},
        {"kind": "task", "step": 3, "task": "piqa", "acc": 0.75},
        {"kind": "task", "step": 3, "task": "copa", "acc": 0.25},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert summarize(path) == RunSummary(
        steps=3, tokens=192, tokens_per_second=30.0, first_eval=records[0],
        last_eval=records[8], last_tasks=(records[11], records[12]),
        first_sample="x\0", last_sample="yy", sample_prompt=None,
    )  # fmt: skip


def test_missing_measurements_are_none(tmp_path: Path) -> None:
    nothing = RunSummary(0, 0, None, None, None, (), None, None, None)
    assert summarize(tmp_path / "metrics.jsonl") == nothing
