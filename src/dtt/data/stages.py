"""How large each step of a run is: batch and context schedules, set against its length.

Imports neither torch nor numpy: a login node asks this before it submits a job.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any, assert_never

from dtt.config.base import Unit, measure
from dtt.config.batch import ConstantBatch, DoublingBatch, LinearBatch, ListedBatch
from dtt.config.train import TrainConfig
from dtt.errors import ConfigError

LR_EXPONENT = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The learning rate goes with the batch to the power of this."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the run in which all steps are of one size."""

    step: int
    """The first, counted from 0."""
    samples: int
    """Samples of the run before it."""
    sequences: int
    """Samples in each of its steps."""
    seq_len: int
    """Tokens in the rows that the model sees: those of a sample, or a whole part of them."""
    lr_factor: float
    """By what the schedule's learning rate is multiplied."""


@dataclass(frozen=True)
class Stages:
    """The size of every step, found in O(log stages). A sample is always of the longest context.

    Steps and samples count from 0; the last stage has no end.
    """

    sample_tokens: int
    stages: tuple[Stage, ...]

    def at(self, step: int) -> Stage:
        """The stage that a step is in."""
        return self.stages[bisect_right(self.stages, step, key=attrgetter("step")) - 1]

    def first_sample(self, step: int) -> int:
        """Samples before a step."""
        stage = self.at(step)
        return stage.samples + (step - stage.step) * stage.sequences

    def step_of(self, sample: int) -> int:
        """The step that takes a sample; so many steps are whole when the samples end before it."""
        stage = self.stages[bisect_right(self.stages, sample, key=attrgetter("samples")) - 1]
        return stage.step + (sample - stage.samples) // stage.sequences

    def tokens_before(self, step: int) -> int:
        """Tokens, in whole samples, of all steps before this one."""
        return self.first_sample(step) * self.sample_tokens

    def step_after(self, tokens: Fraction | int) -> int:
        """The first step that has so many tokens, or more, before it."""
        samples = math.ceil(tokens / self.sample_tokens)
        return self.step_of(samples - 1) + 1 if samples > 0 else 0

    def batch_tokens(self, step: int) -> int:
        """Tokens that a step takes."""
        return self.at(step).sequences * self.sample_tokens

    def describe(self, steps: int) -> str:
        """The size of the first step in words, and of the last of `steps` where that differs."""
        first, last = self.batch_tokens(0), self.batch_tokens(steps - 1)
        said = f"{first} tokens" if first == last else f"{first} to {last} tokens"
        short, long = self.at(0).seq_len, self.at(steps - 1).seq_len
        return said if short == long else f"{said} in contexts of {short} to {long}"

    def record(self, step: int) -> dict[str, Any]:
        """What metrics say of a step's size; nothing where all steps are alike."""
        if len(self.stages) == 1:
            return {}
        return {"batch_tokens": self.batch_tokens(step), "seq_len": self.at(step).seq_len}


def resolve(train: TrainConfig) -> Stages:
    """Set the schedules of `train` against its steps.

    ConfigError for a stage that would begin before the one ahead of it, or after the end.
    """
    batches = _batches(train)
    contexts = {0: train.seq_len}
    for start, seq_len in train.context_schedule:
        step = _step(measure(start), train, batches)
        _check_place("train.context_schedule", seq_len, step, max(contexts), train)
        contexts[step] = seq_len
    changes = sorted(contexts.keys() | {stage.step for stage in batches.stages})
    merged, seq_len = [], train.seq_len
    for step in changes:
        seq_len = contexts.get(step, seq_len)
        samples = batches.first_sample(step)
        merged.append(replace(batches.at(step), step=step, samples=samples, seq_len=seq_len))
    return Stages(train.seq_len, tuple(merged))


def _batches(train: TrainConfig) -> Stages:
    """The batches alone, each at the full context."""
    schedule, full, seq_len = train.batch_schedule, train.global_batch_tokens, train.seq_len
    exponent = 0.0 if isinstance(schedule, ConstantBatch) else LR_EXPONENT[schedule.lr_rule]
    found = Stages(seq_len, ())
    for start, tokens in _sizes(train):
        step = _step(start, train, found)
        samples = found.first_sample(step) if found.stages else 0
        ahead = found.stages[-1].step if found.stages else 0
        _check_place("train.batch_schedule", tokens, step, ahead, train)
        # One that begins where the one ahead of it does leaves that one no step.
        kept = found.stages[:-1] if step == ahead else found.stages
        stage = Stage(step, samples, tokens // seq_len, seq_len, (tokens / full) ** exponent)
        found = Stages(seq_len, (*kept, stage))
    return found


def _sizes(train: TrainConfig) -> Iterator[tuple[tuple[Unit, Fraction], int]]:
    """From when on, and tokens in a step: the first from 0, the last the full batch."""
    schedule, full = train.batch_schedule, train.global_batch_tokens
    match schedule:
        case ConstantBatch():
            yield ("steps", Fraction(0)), full
        case DoublingBatch(start=start):
            unit, every = measure(schedule.every)
            for k in range(((full - 1) // start).bit_length() + 1):
                yield (unit, k * every), min(start << k, full)
        case LinearBatch(start=start):
            unit, length = measure(schedule.length)
            increment = schedule.increment or start
            count = (full - start) // increment
            for k in range(count + 1):  # each begins where the straight line reaches it
                yield (unit, k * length / count), start + k * increment
        case ListedBatch():
            for begin, tokens in schedule.stages:
                yield measure(begin), tokens
        case _:
            assert_never(schedule)


def _step(start: tuple[Unit, Fraction], train: TrainConfig, batches: Stages) -> int:
    """The step that something begins with, given the batches before it."""
    unit, amount = start
    match unit:
        case "steps":
            return math.ceil(amount)
        case "share":
            return round(amount * train.steps)
        case "tokens":
            return batches.step_after(amount)
        case _:
            assert_never(unit)


def _check_place(key: str, size: int, step: int, ahead: int, train: TrainConfig) -> None:
    """ConfigError unless a stage may begin at `step` of the run."""
    if step < ahead:
        raise ConfigError(
            f"the stages of {key} do not follow one another",
            why=f"{size} would begin with step {step + 1}, before what stands ahead of it: that "
            f"begins with step {ahead + 1}",
            next=f"put them in order, all in steps, in shares or in tokens; "
            f"dtt config explain {key}",
        )
    if step >= train.steps:
        raise ConfigError(
            f"{key} comes to {size} only after the end of the run",
            why=f"that would begin with step {step + 1}, and train.steps = {train.steps}",
            next=f"a larger train.steps, or shorter stages; dtt config explain {key}",
        )
