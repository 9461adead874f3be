"""What a rank of a pipeline holds and receives because of the order of its passes.

The orders are those of `Schedule1F1B` and `ScheduleInterleaved1F1B` of torch.distributed.pipelining
(Narayanan et al., 2021, arXiv 2104.04473).
"""

from __future__ import annotations

from collections import Counter

from dtt.estimate.activations import activations
from dtt.estimate.case import Case


def others(case: Case, *, last: bool) -> int:
    """Return the bytes of activations of other passes during a backward pass of the stage.

    It is the `last` one of the stage in a step, or one before.
    """
    ranks, stages = case.sizes.pipeline, len(case.own_stages)
    if last:  # a round has a micro-batch for each rank, and the last stage goes backward first
        counts = Counter(dict.fromkeys(range(case.stage // ranks), ranks))
    else:  # forward passes take turns among the stages, round by round
        counts = Counter(i // ranks % stages for i in range(most_waiting(case)))
        counts[stages - 1] -= 1
    kept = 0
    for number, count in counts.items():
        of_stage = case.of_stage(case.rank + number * ranks)
        kept += count * _kept(of_stage)
    return kept


def most_waiting(case: Case) -> int:
    """Return the maximum number of passes of a rank that wait for their backward pass.

    Forward passes start ahead of the backward ones, by as many as it takes until the first gradient
    returns; then the two alternate.
    """
    ranks, stages = case.sizes.pipeline, len(case.own_stages)
    after = ranks - 1 - case.rank
    ahead = after if stages == 1 else (stages - 1) * ranks + 2 * after
    return min(stages * case.accumulation, ahead + 1)


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
