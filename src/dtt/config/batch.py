"""How large the steps of a run are: batches, and contexts, that grow while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Length, Section, measure

Sizes = tuple[tuple[Length, PositiveInt], ...]
"""From when on, and how large: `[[0, 512], [20%, 1024]]`."""


class ConstantBatch(Section):
    """Every step takes `train.global_batch_tokens`."""

    type: Literal["constant"] = "constant"


class GrowingBatch(Section):
    """What all batches that grow up to `train.global_batch_tokens` share."""

    lr_rule: Literal["none", "sqrt", "linear"] = "none"
    """The learning rate while the batch is smaller than the full one, by their ratio r: as the
    schedule says, or also times sqrt(r) (for Adam: arXiv 2205.10287) or r (for SGD: 1706.02677)."""


class DoublingBatch(GrowingBatch):
    """The batch doubles from time to time; the last time it may grow by less."""

    type: Literal["doubling"] = "doubling"
    start: PositiveInt = 8_192
    """Tokens in the first steps."""
    every: Length = 0.05
    """Between one doubling and the next: steps, a share of the run (`5%`), or `50M tokens`."""


class LinearBatch(GrowingBatch):
    """The batch grows by equal amounts, along a straight line over steps or tokens."""

    type: Literal["linear"] = "linear"
    start: PositiveInt = 8_192
    """Tokens in the first steps."""
    increment: PositiveInt | None = None
    """Tokens by which the batch grows at a time; null: `start`."""
    length: Length = 0.2
    """Until the batch is full: steps, a share of the run (`20%`), or `50M tokens`."""


class ListedBatch(GrowingBatch):
    """The batches that are named."""

    type: Literal["list"] = "list"
    stages: Sizes = ()
    """From when on (steps, a share of the run, or tokens), and tokens in a step: `[[0, 8192],
    [50M tokens, 65536]]`. The last is the full batch."""


BatchSchedule = Annotated[
    ConstantBatch | DoublingBatch | LinearBatch | ListedBatch, Field(discriminator="type")
]


def batch_problems(schedule: BatchSchedule, full: int, seq_len: int) -> Iterator[tuple[str, str]]:
    """Keys of a schedule that cannot be, and why; `full` batches are whole sequences already."""
    if isinstance(schedule, ListedBatch):
        for why in stage_problems(schedule.stages, full, "train.global_batch_tokens"):
            yield "stages", why
        for _, tokens in schedule.stages:
            if tokens % seq_len:
                yield "stages", f"{tokens} is not a multiple of train.seq_len = {seq_len}"
    elif isinstance(schedule, DoublingBatch | LinearBatch):
        if schedule.start >= full:
            yield "start", f"{schedule.start} is not below train.global_batch_tokens = {full}"
        if schedule.start % seq_len:
            yield "start", f"{schedule.start} is not a multiple of train.seq_len = {seq_len}"
        if isinstance(schedule, LinearBatch):
            increment = schedule.increment or schedule.start
            if increment % seq_len:
                yield "increment", f"{increment} is not a multiple of train.seq_len = {seq_len}"
            elif (full - schedule.start) % increment:
                yield "increment", f"{increment} does not divide {full} - {schedule.start}"


def stage_problems(stages: Sizes, last: int, key: str) -> Iterator[str]:
    """Why these cannot be the stages that lead to the value `last` of `key`."""
    sizes = [size for _, size in stages]
    if not stages or measure(stages[0][0])[1] != 0:
        yield "the first must begin at 0"
    elif sizes != sorted(set(sizes)):
        yield f"must grow from stage to stage (got {', '.join(map(str, sizes))})"
    elif sizes[-1] != last:
        yield f"the last must be {key} = {last} (got {sizes[-1]})"
