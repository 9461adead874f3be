"""Batch-size and context-length schedules: sizes of training steps that grow during the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Length, LengthKey, Section

BatchStages = tuple[tuple[LengthKey, PositiveInt], ...]
"""Pairs of start and size from there on, such as `[[0, 512], [20%, 1024]]`."""


class ConstantBatch(Section):
    """A constant batch size: every step takes `train.global_batch_tokens`."""

    type: Literal["constant"] = "constant"


class DoublingBatch(Section):
    """A batch size that doubles at regular intervals; the last increase may be smaller."""

    type: Literal["doubling"] = "doubling"
    start: PositiveInt = 8_192
    """Tokens per step at the start of the run."""
    every: LengthKey = Length(0.05)
    """Interval between doublings: steps, a share of the run (`5%`), or `50M tokens`."""


class ListedBatch(Section):
    """An explicit list of batch sizes."""

    type: Literal["list"] = "list"
    stages: BatchStages = ()
    """Pairs of start (steps, a share of the run, or tokens) and tokens per step:
    `[[0, 8192], [50M tokens, 65536]]`. The last size must be the full batch."""


BatchSchedule = Annotated[ConstantBatch | DoublingBatch | ListedBatch, Field(discriminator="type")]


def batch_problems(schedule: BatchSchedule, full: int, seq_len: int) -> Iterator[tuple[str, str]]:
    """Yield `(key, why)` for each invalid value of a batch-size schedule.

    `full` is the full batch in tokens; the caller has checked that it is a multiple of `seq_len`.
    """
    if isinstance(schedule, ListedBatch):
        for why in stage_problems(schedule.stages, full, "train.global_batch_tokens"):
            yield "stages", why
        for _, tokens in schedule.stages:
            if tokens % seq_len:
                yield "stages", f"{tokens} is not a multiple of train.seq_len = {seq_len}"
    elif isinstance(schedule, DoublingBatch):
        if schedule.start >= full:
            yield "start", f"{schedule.start} is not below train.global_batch_tokens = {full}"
        if schedule.start % seq_len:
            yield "start", f"{schedule.start} is not a multiple of train.seq_len = {seq_len}"


def stage_problems(stages: BatchStages, last: int, key: str) -> Iterator[str]:
    """Yield reasons why `stages` is not a valid schedule that ends at the value `last` of `key`."""
    sizes = [size for _, size in stages]
    if not stages or stages[0][0].amount != 0:
        yield "the first must begin at 0"
    elif sizes != sorted(set(sizes)):
        yield f"must grow from stage to stage (got {', '.join(map(str, sizes))})"
    elif sizes[-1] != last:
        yield f"the last must be {key} = {last} (got {sizes[-1]})"
