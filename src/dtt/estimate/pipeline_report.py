"""The part of a plan that is about the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dtt.estimate import pipeline_passes
from dtt.estimate.case import Case
from dtt.estimate.duration import StepEstimate, step_of
from dtt.estimate.memory import GIB, MemoryEstimate

COLUMNS = {
    "weights": "parameters", "optimizer": "optimizer state", "gradients": "gradients",
    "gathered": "gathered parameters", "activations": "activations",
    "received": "received hidden states",
}  # fmt: skip
"""Part of the memory by column."""
WORTHWHILE = 0.01
"""Fraction of a step that another division of the layers must save to be suggested."""


def lines(case: Case, ranks: Sequence[MemoryEstimate], step: StepEstimate) -> Iterator[str]:
    """Yield a table with a line for each rank of the pipeline, and a better division of layers."""
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
    if better := division(case, step):
        counts = ",".join(map(str, better.layers))
        yield f"a step takes {better.saved:.1%} less with parallel.layers_per_stage=[{counts}]"


def facts(case: Case, ranks: Sequence[MemoryEstimate], step: StepEstimate) -> dict[str, Any]:
    """Return the same for `--json`; nothing without a pipeline."""
    if case.sizes.pipeline == 1:
        return {}
    better = division(case, step)
    return {
        "pipeline_ranks": [
            {"layers": case.of_rank(rank).own_blocks, "memory": one.parts, "peak": one.total}
            for rank, one in enumerate(ranks)
        ],
        "idle_seconds": step.idle,
        "layers_per_stage": None if better is None else better.layers,
    }


class Division(NamedTuple):
    """The number of layers of each stage, and the fraction of a step that it saves."""

    layers: tuple[int, ...]
    saved: float


def division(case: Case, step: StepEstimate) -> Division | None:
    """Return the division of the layers with the shortest step; None if it is hardly shorter.

    The head takes as long as one or a few layers, so that the last stage should have fewer.
    """
    parallel, stages = case.cfg.parallel, case.stages
    if case.sizes.pipeline == 1 or parallel.layers_per_stage is not None:
        return None
    found = []
    for last in range(1, len(stages[-1])):
        layers = pipeline_passes.division(case.arch.n_layers, len(stages), last)
        section = parallel.model_copy(update={"layers_per_stage": layers})
        divided = replace(case, cfg=case.cfg.model_copy(update={"parallel": section}))
        found.append(Division(layers, 1 - step_of(divided).seconds / step.seconds))
    best = max(found, key=lambda one: one.saved, default=None)
    return best if best is not None and best.saved >= WORTHWHILE else None
