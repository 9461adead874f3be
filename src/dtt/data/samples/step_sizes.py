"""The batch-size and context-length schedules of a run, resolved to the size of each step.

The module imports neither torch nor numpy, because a login node uses it before it submits a job.

- Each global batch must be divisible by the number of data-parallel ranks.
- A sample is always a window of `train.seq_len`. For a shorter context, dtt reads it as several
  consecutive rows, each with its own positions and attention. So the shuffle, the data hash and
  the targets are those of a run without the schedule, and the number of tokens per micro-batch is
  constant.
- Evaluation uses the full length.
- Compiled blocks are recompiled for every size. The number of compilations is smallest if each
  batch is a multiple of ranks times `train.micro_batch` sequences.
- Sizes given as fractions of the run depend on `train.steps`. A job that resumes with more steps
  would have had different sizes; dtt refuses to resume it unless the sizes of past steps stay the
  same. Give them in steps or tokens if you plan to extend the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any, assert_never

from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.config.base import Unit
from dtt.config.train import ConstantBatch, DoublingBatch, ListedBatch, TrainConfig


@dataclass(frozen=True)
class StepRange:
    """A range of steps with the same batch size and context length."""

    step: int
    """First step, counted from 0."""
    samples: int
    """Samples of the run before the first step."""
    sequences: int
    """Samples per step."""
    seq_len: int
    """Context length in tokens: the length of a sample, or a divisor of it."""


@dataclass(frozen=True)
class StepSizes:
    """The batch size and context length of every step, found in O(log ranges).

    Samples always have the longest context length. Steps and samples count from 0; the last range
    has no end.
    """

    sample_tokens: int
    """Tokens per sample."""
    ranges: tuple[StepRange, ...]
    """The ranges in ascending order of their first steps."""

    def at(self, step: int) -> StepRange:
        """Return the range that contains a step."""
        return self.ranges[bisect_right(self.ranges, step, key=attrgetter("step")) - 1]

    def ranges_from(self, step: int) -> tuple[StepRange, ...]:
        """Return the range that contains a step, and those after it."""
        return self.ranges[self.ranges.index(self.at(step)) :]

    def first_sample(self, step: int) -> int:
        """Return the number of samples before a step."""
        current = self.at(step)
        return current.samples + (step - current.step) * current.sequences

    def step_of(self, sample: int) -> int:
        """Return the step that consumes a sample.

        This is also the number of complete steps in a run that has only the samples before it.
        """
        current = self.ranges[bisect_right(self.ranges, sample, key=attrgetter("samples")) - 1]
        return current.step + (sample - current.samples) // current.sequences

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens of all steps before this one."""
        return self.first_sample(step) * self.sample_tokens

    def step_after(self, tokens: Fraction | int) -> int:
        """Return the first step that at least `tokens` tokens precede."""
        samples = math.ceil(tokens / self.sample_tokens)
        return self.step_of(samples - 1) + 1 if samples > 0 else 0

    def batch_tokens(self, step: int) -> int:
        """Return the number of tokens of a step."""
        return self.at(step).sequences * self.sample_tokens

    def describe(self, steps: int) -> str:
        """Return the size of the first step in words, and of the last of `steps` if it differs."""
        first, last = self.batch_tokens(0), self.batch_tokens(steps - 1)
        text = f"{first} tokens" if first == last else f"{first} to {last} tokens"
        short, long = self.at(0).seq_len, self.at(steps - 1).seq_len
        return text if short == long else f"{text} in contexts of {short} to {long}"

    def record(self, step: int) -> dict[str, Any]:
        """Return the metrics of a step's size; empty if all steps have the same size."""
        if len(self.ranges) == 1:
            return {}
        return {"batch_tokens": self.batch_tokens(step), "seq_len": self.at(step).seq_len}


def step_sizes_of(train: TrainConfig) -> StepSizes:
    """Resolve the batch-size and context-length schedules of `train` to steps.

    Raises ConfigError for an entry that would start before the preceding one, or after the end
    of the run.
    """
    batches = _batches(train)
    contexts = {0: train.seq_len}
    for start, seq_len in train.context_schedule:
        step = _step(start.unit, start.amount, train, batches)
        _check_place("train.context_schedule", seq_len, step, max(contexts), train)
        contexts[step] = seq_len
    changes = sorted(contexts.keys() | {one.step for one in batches.ranges})
    merged, seq_len = [], train.seq_len
    for step in changes:
        seq_len = contexts.get(step, seq_len)
        samples = batches.first_sample(step)
        merged.append(replace(batches.at(step), step=step, samples=samples, seq_len=seq_len))
    return StepSizes(train.seq_len, tuple(merged))


def steps_of_epochs(train: TrainConfig, samples: int) -> int:
    """Return the number of steps of `train.epochs` passes over data of `samples` samples.

    The last step is the one in which the last of these samples is consumed. A batch-size schedule
    may be in shares of the run, so that the number of samples depends on the number of steps. It
    grows with it, and the smallest number of steps that is enough is found by bisection.

    Raises ConfigError for a schedule that does not fit into these steps, and if `train.steps` is
    given too and differs.
    """
    assert train.epochs is not None
    total = math.ceil(Fraction(str(train.epochs)) * samples)

    def enough(steps: int) -> bool:
        try:
            sizes = step_sizes_of(train.model_copy(update={"steps": steps}))
        except ConfigError:  # an entry of a schedule starts later
            return False
        return sizes.first_sample(steps) >= total

    steps = bisect_left(range(total), True, lo=1, key=enough)
    sizes = step_sizes_of(train.model_copy(update={"steps": steps}))
    if (first := sizes.first_sample(1)) > total:
        log.info(
            "train.epochs=%g of %d samples is less than one step, which repeats them until it has "
            "%d: a smaller train.global_batch_tokens, such as %d, takes each once",
            *(train.epochs, samples, first, total * train.seq_len),
        )
    if steps > 1 and sizes.first_sample(steps - 1) >= total:
        # Fewer steps would be enough, but an entry of a schedule starts later: report it.
        step_sizes_of(train.model_copy(update={"steps": steps - 1}))
    if train.steps not in (0, steps):
        raise ConfigError(
            f"train.steps={train.steps} contradicts train.epochs={train.epochs:g}",
            why=f"{train.epochs:g} epochs of {samples} samples are {steps} steps",
            next="leave out one of them",
        )
    return steps


def _batches(train: TrainConfig) -> StepSizes:
    """Resolve the batch-size schedule alone, at the full context length."""
    seq_len = train.seq_len
    sizes = StepSizes(seq_len, ())
    for unit, amount, tokens in _sizes(train):
        step = _step(unit, amount, train, sizes)
        samples = sizes.first_sample(step) if sizes.ranges else 0
        ahead = sizes.ranges[-1].step if sizes.ranges else 0
        _check_place("train.batch_schedule", tokens, step, ahead, train)
        # If both start at the same step, the preceding range has no steps and is dropped.
        kept = sizes.ranges[:-1] if step == ahead else sizes.ranges
        added = StepRange(step, samples, tokens // seq_len, seq_len)
        sizes = StepSizes(seq_len, (*kept, added))
    return sizes


def _sizes(train: TrainConfig) -> Iterator[tuple[Unit, Fraction, int]]:
    """Yield (unit and amount of the start, tokens per step) of each entry.

    The first one starts at 0, and the last one has the full batch.
    """
    schedule, full = train.batch_schedule, train.global_batch_tokens
    match schedule:
        case ConstantBatch():
            yield "steps", Fraction(0), full
        case DoublingBatch(start=start):
            unit, every = schedule.every.unit, schedule.every.amount
            for k in range(((full - 1) // start).bit_length() + 1):
                yield unit, k * every, min(start << k, full)
        case ListedBatch():
            for begin, tokens in schedule.stages:
                yield begin.unit, begin.amount, tokens
        case _:
            assert_never(schedule)


def _step(unit: Unit, amount: Fraction, train: TrainConfig, batches: StepSizes) -> int:
    """Return the step of a point in the run, given the batches before it."""
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
    """Raise ConfigError unless an entry may start at `step`; the one before starts at `ahead`."""
    if step < ahead:
        raise ConfigError(
            f"the entries of {key} do not follow one another",
            why=f"{size} would begin with step {step + 1}, before what stands ahead of it: that "
            f"begins with step {ahead + 1}",
            next=f"put them in order, all in steps, in shares or in tokens; "
            f"dtt config explain {key}",
        )
    if step >= train.steps:
        raise ConfigError(
            f"{key} reaches {size} only after the end of the run",
            why=f"that would begin with step {step + 1}, and train.steps = {train.steps}",
            next=f"a larger train.steps, or shorter stages; dtt config explain {key}",
        )
