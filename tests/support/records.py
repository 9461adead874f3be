"""The records of a job in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtt.track import jsonl

OF_TRAINING = ("train", "eval", "task", "sample")
"""Kinds of records that are the same in two runs, unlike speeds."""


def records(job: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of these kinds; without any, those of `OF_TRAINING`."""
    wanted = kinds or OF_TRAINING
    return [record for record in jsonl.read(job / "metrics.jsonl") if record["kind"] in wanted]


def assert_same_tensors(one: Path, other: Path, step: int) -> None:
    """Weights and optimizer state that two jobs saved after `step` are equal bit for bit."""
    files = sorted((one / f"checkpoints/step-{step:06d}").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file.name


def reached(job: Path) -> int:
    """Newest step in the job's metrics."""
    return max((record["step"] for record in records(job, "train")), default=0)
