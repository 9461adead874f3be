"""The schedule of a run: its number of steps and learning rates, which a time limit may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtt.config.base import Length
from dtt.config.schedule import Decay
from dtt.data.samples.step_sizes import StepSizes
from dtt.optim.schedule import ResolvedSchedule
from dtt.train.supervise.time_budget import TimeBudget


@dataclass
class RunSchedule:
    """A schedule whose decay a time limit starts; without one it never changes.

    A run with a time limit starts without a decay. After each step rank 0 asks `proposed_end`, and
    when that is a step, all ranks call `end_at` with it, once.
    """

    steps: int
    """Number of steps to the end of the run; before the decay of a timed run, the maximum."""
    schedule: ResolvedSchedule
    """Learning rates, without the factors of the batch-size schedule."""
    step_sizes: StepSizes
    """Batch-size and context-length schedules."""
    budget: TimeBudget | None = None
    """The time budget, on rank 0 of a run that a time limit ends."""
    ended_by: str | None = None
    """The action of the user's own that has ended the run before its last step."""

    def multiplier(self, step: int) -> float:
        """Return the learning rate of a step (counted from 0) as a fraction of the peak."""
        return self.step_sizes.at(step).lr_factor * self.schedule.multiplier(step)

    def multipliers_of_groups(self, step: int) -> dict[Length, float]:
        """Return the same for groups with their own decay, by its duration."""
        factor = self.step_sizes.at(step).lr_factor
        own = self.schedule.multipliers_of_groups(step)
        return {length: factor * multiplier for length, multiplier in own.items()}

    def proposed_end(self, step: int, worked: float, pauses: Mapping[str, float]) -> int:
        """Return the step that the run ends with if its decay starts now; 0 if it does not.

        Call it after each `step`; the arguments are those of `TimeBudget.measure`.
        """
        if self.budget is None or self.schedule.decay is not None:
            return 0
        left = self.budget.left()
        self.budget.measure(step, left, worked, pauses)
        return self.budget.end(step, left)

    def end_at(self, step: int, end: int) -> None:
        """Start the decay at `step`, and end the run with step `end`."""
        self.steps, self.schedule = end, self.schedule.with_decay(Decay(step, end))

    def end_now(self, step: int, by: str) -> None:
        """Make `step` the last one, without a decay: the action `by` has asked for it."""
        self.steps, self.ended_by = step, by

    def expected_steps(self, step: int) -> int:
        """Return the step that the run is expected to end with; an estimate before the decay."""
        if self.budget is None or self.schedule.decay is not None:
            return self.steps
        return self.budget.latest(step, self.budget.left())

    def record_save(self, seconds: float) -> None:
        """Set the time that the last save of the run will take, until it is verified."""
        if self.budget is not None:
            self.budget.measured["whole_save"] = seconds

    def state(self) -> dict[str, Any]:
        """Return the fields of position.json that describe the schedule."""
        return {
            "warmup": self.schedule.warmup,
            "decay": self.schedule.decay and asdict(self.schedule.decay),
            "speed": self.budget and self.budget.measured,
            "ended_by": self.ended_by,
        }
