"""The part of a plan that is about the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dtt.estimate import pipeline_passes
from dtt.estimate.case import Case
from dtt.estimate.duration import StepEstimate
from dtt.estimate.memory import GIB, MemoryEstimate

COLUMNS = {
    "weights": "parameters", "optimizer": "optimizer state", "gradients": "gradients",
    "gathered": "gathered parameters", "activations": "activations",
    "received": "received hidden states",
}  # fmt: skip
"""Part of the memory by column."""


def lines(case: Case, ranks: Sequence[MemoryEstimate], step: StepEstimate) -> Iterator[str]:
    """Yield a table with a line for each rank of the pipeline."""
    widths = [len(column) + 2 for column in COLUMNS] + [9]
    head = "".join(f"{name:>{n}}" for name, n in zip((*COLUMNS, "total"), widths, strict=True))
    yield f"{'rank':<5}{'layers':>7}{'waiting':>8}{head}"
    for rank, peak in enumerate(ranks):
        of_rank = case.of_rank(rank)
        sizes = [*(peak.parts.get(part, 0) for part in COLUMNS.values()), peak.total]
        columns = "".join(f"{size / GIB:>{n}.2f}" for size, n in zip(sizes, widths, strict=True))
        yield f"{rank:<5}{of_rank.own_blocks:>7}{pipeline_passes.most_waiting(of_rank):>8}{columns}"
    yield "at each rank's peak in GiB; waiting: passes whose backward pass has not started"
    yield f"each rank is idle for {step.idle / step.seconds:.1%} of a step, at its start and end"


def facts(case: Case, ranks: Sequence[MemoryEstimate], step: StepEstimate) -> dict[str, Any]:
    """Return the same for `--json`; nothing without a pipeline."""
    if case.sizes.pipeline == 1:
        return {}
    return {
        "pipeline_ranks": [
            {"layers": case.of_rank(rank).own_blocks, "memory": one.parts, "peak": one.total}
            for rank, one in enumerate(ranks)
        ],
        "idle_seconds": step.idle,
    }
