"""The complete estimate of a run: memory, step and duration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtt.config.run import RunConfig
from dtt.config.value_types import seconds
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.duration import (
    RunEstimate,
    StepEstimate,
    run_of,
    seconds_of,
    slowed,
    step_of,
)
from dtt.estimate.memory import SPARE, MemoryEstimate, by_rank
from dtt.estimate.vocabulary import vocabulary_and_steps


@dataclass(frozen=True)
class Estimate:
    """The complete estimate of a run."""

    case: Case
    ranks: list[MemoryEstimate]
    """The memory of each rank of a pipeline; one without a pipeline."""
    step: StepEstimate
    run: RunEstimate
    slow_step: StepEstimate
    slow_run: RunEstimate
    """The same at the speed of the slowest published run that is divided alike."""
    price: float | None
    """Price of a device hour, in any currency; None: no cost is printed."""

    @property
    def memory(self) -> MemoryEstimate:
        """The memory of the rank that needs most."""
        return max(self.ranks, key=lambda one: one.total)

    @property
    def room(self) -> float:
        """Bytes of device memory that the run may use at its peak."""
        return (1 - SPARE[self.case.gpu.kind]) * self.case.gpu.memory

    @property
    def fits(self) -> bool:
        """True if the peak fits into the memory of a device."""
        return self.memory.total <= self.room

    @property
    def device_hours(self) -> float:
        """Device hours of the run: number of devices times hours."""
        return self.case.devices * self.run.seconds / 3600


def make_estimate(
    cfg: RunConfig,
    device: gpus.Gpu,
    price: float | None,
    expected_size: int | None = None,
) -> Estimate:
    """Return the estimate of a run on GPUs of one kind.

    `expected_size` is the vocabulary size if neither token files nor a tokenizer exist yet. A time
    budget ends the run after the steps that it leaves time for.
    """
    vocab_size, steps, cfg = vocabulary_and_steps(cfg, expected_size)
    return estimate_of(cfg, device, price, vocab_size, steps)


def estimate_of(
    cfg: RunConfig, device: gpus.Gpu, price: float | None, vocab_size: int, steps: int
) -> Estimate:
    """Return the estimate of a run whose vocabulary and number of steps are known."""
    case = make_case(cfg, device, cfg.launch.nodes, cfg.launch.processes, vocab_size, steps)
    step = step_of(case)
    if (budget := cfg.train.budget) is not None:
        within = max(1, int(seconds(budget) * steps / seconds_of(case, step)))
        case = replace(case, steps=min(steps, within))
        step = step_of(case)
    slow = slowed(case, step)
    runs = step, run_of(case, step), slow, run_of(case, slow)
    return Estimate(case, by_rank(case), *runs, price)
