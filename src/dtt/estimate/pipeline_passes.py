"""Order of a pipeline's passes, and what a rank of it holds because of them.

The orders are those of `Schedule1F1B` and `ScheduleInterleaved1F1B` of torch.distributed.pipelining
(Narayanan et al., 2021, arXiv 2104.04473).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from dtt.estimate.activations import activations
from dtt.estimate.case import Case


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    """Number of the stage among those of the rank."""
    micro_batch: int


def order(ranks: int, stages: int, micro_batches: int, rank: int) -> Iterator[Pass]:
    """Yield the passes of a rank that has `stages` of `ranks * stages` stages.

    Several stages take turns, each with one micro-batch for every rank, the last stage first in the
    backward pass. Forward passes start ahead of the backward ones, by as many as it takes until the
    first gradient returns; then the two alternate.
    """
    total, after = stages * micro_batches, ranks - 1 - rank
    ahead = after if stages == 1 else min(total, (stages - 1) * ranks + 2 * after)

    def number(i: int) -> tuple[int, int]:
        turn, place = divmod(i, ranks)
        if stages == 1:
            return 0, i
        return turn % stages, turn // stages * ranks + place

    for i in range(total + ahead):
        if i < total:
            yield Pass(True, *number(i))
        if i >= ahead:
            stage, micro_batch = number(i - ahead)
            yield Pass(False, stages - 1 - stage, micro_batch)


@cache
def waiting(
    ranks: int, rank: int, layers: tuple[int, ...], micro_batches: int, stage: int, last: bool
) -> Counter[int]:
    """Return how many passes, by stage of the rank, wait for their backward pass during another.

    That is a backward pass of `stage`: its `last` in a step, or the one with most waiting before.
    `layers` are the numbers of layers of the stages of the rank.
    """
    now = Counter[int]()
    found = Counter[int]()
    for one in order(ranks, len(layers), micro_batches, rank):
        now[one.stage] += 1 if one.forward else -1
        if one.forward or one.stage != stage or last != (one.micro_batch == micro_batches - 1):
            continue
        if _layers(now, layers) >= _layers(found, layers):
            found = now.copy()
    return found


def _layers(counts: Counter[int], layers: tuple[int, ...]) -> int:
    return sum(counts[stage] * n for stage, n in enumerate(layers))


def others(case: Case, *, last: bool) -> int:
    """Return the bytes of activations of other passes during a backward pass of the stage."""
    ranks = case.sizes.pipeline
    counts = _waiting(case, last)
    return sum(n * _kept(case.of_stage(case.rank + i * ranks)) for i, n in counts.items())


def most_waiting(case: Case) -> int:
    """Return the maximum number of passes of a rank that wait for their backward pass."""
    stages = range(case.rank, len(case.stages), case.sizes.pipeline)
    return max(_waiting(case.of_stage(stage), False).total() for stage in stages) + 1


def _waiting(case: Case, last: bool) -> Counter[int]:
    ranks = case.sizes.pipeline
    layers = tuple(map(len, case.own_stages))
    return waiting(ranks, case.rank, layers, case.accumulation, case.stage // ranks, last)


def _kept(case: Case) -> int:
    """Return the bytes that a pass through the stage keeps for its backward pass.

    What it has received is not among them, but in `buffers`; what it has sent is.
    """
    kept = activations(case, case.blocks)
    if not case.first and (case.compiled or case.cfg.train.remat != "none"):
        kept -= hidden(case)
    return kept + (0 if case.last else hidden(case))


def hidden(case: Case) -> int:
    """Return the bytes of the hidden states of a micro-batch on one device."""
    return case.product_bytes * case.tokens * case.arch.dim // case.sizes.tensor


def received(case: Case) -> int:
    """Return the bytes that the rank receives from its neighbours in a step.

    torch has a buffer for each hidden state and each gradient of it, from the first step on.
    """
    ranks, stages = case.sizes.pipeline, len(case.stages)
    if ranks == 1:
        return 0
    own = range(case.rank, stages, ranks)
    pairs = sum((stage > 0) + (stage < stages - 1) for stage in own)
    return pairs * case.accumulation * hidden(case)


def idle(case: Case) -> float:
    """Return the time that a rank waits in a step for others, relative to that of its passes."""
    ranks, stages = case.sizes.pipeline, case.cfg.parallel.stages_per_rank
    return (ranks - 1) / (stages * case.accumulation)
