"""Summary of a run, computed from metrics.jsonl."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dtt.base.reading import Kind, fits
from dtt.track import jsonl
from dtt.track.base import Record

NEEDED: dict[str, dict[str, Kind]] = {
    "train": {"tokens": int},
    "eval": {"loss": (float, type(None))},
    "task": {"task": str},
    "perf": {"tokens_per_second": float},
}


@dataclass(frozen=True)
class RunSummary:
    """Key figures of a run; None for figures that were not measured."""

    steps: int
    tokens: int
    tokens_per_second: float | None
    """Median over the run, of all devices together."""
    first_eval: Record | None
    last_eval: Record | None
    last_tasks: tuple[Record, ...]
    """Scores of the newest evaluation of benchmark tasks, one record per task."""
    first_sample: str | None
    last_sample: str | None
    sample_prompt: str | None
    """Prompt of the samples; None in records of earlier versions."""

    def facts(self) -> dict[str, Any]:
        """Return the fields that `--json` prints: all except the samples."""
        return {name: value for name, value in asdict(self).items() if "sample" not in name}


def summarize(metrics: Path) -> RunSummary:
    """Summarize the metrics file of a job."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in jsonl.read(metrics):
        if fits(record, NEEDED.get(record["kind"], {})):
            by_kind[record["kind"]].append(record)
    train, evals, tasks = by_kind["train"], by_kind["eval"], by_kind["task"]
    # `fits` rejects NUL, which an untrained byte-level model generates.
    samples = [r["text"] for r in by_kind["sample"] if isinstance(r.get("text"), str)]
    prompts = [record.get("prompt") for record in reversed(by_kind["sample"])]
    rates = [record["tokens_per_second"] for record in by_kind["perf"]]
    return RunSummary(
        steps=train[-1]["step"] if train else 0,
        tokens=train[-1]["tokens"] if train else 0,
        tokens_per_second=median(rates) if rates else None,
        first_eval=evals[0] if evals else None,
        last_eval=evals[-1] if evals else None,
        last_tasks=tuple(r for r in tasks if r["step"] == tasks[-1]["step"]),
        first_sample=samples[0] if samples else None,
        last_sample=samples[-1] if samples else None,
        sample_prompt=next((p for p in prompts if isinstance(p, str)), None),
    )
