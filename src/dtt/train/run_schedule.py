"""The schedule of a run: its steps and learning rates, and the time limit that may change them.

With `train.budget`, rank 0 predicts before each step at which step the run can end. The
prediction uses the seconds per token, averaged over a window that shrinks towards the end, the
evaluations, samples and saves to come, and the last duration of each. When the remaining steps
equal the length of the decay, of at least 5 steps, the decay starts and dtt saves a checkpoint.
From then on the number of steps is fixed, so a run that becomes slower in its decay, or is
interrupted for long, ends later. Checkpoints store the decay and the measured speed.
`attempts/<n>/clock.json` stores how long each attempt ran; an attempt that is killed loses at
most half a second.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from dtt.config.run import RunConfig
from dtt.config.schedule import Decay, TokensBefore, before_last
from dtt.jobs.clock import Clock
from dtt.optim.lr_curves import WsdConfig
from dtt.optim.resolved_schedule import ResolvedSchedule

SHORTEST = 5
"""Minimum steps of a decay, however late it is: a sudden drop of the rate does not anneal."""
SPARE_SECONDS = 5.0
"""Seconds reserved for the end of the process, after the last save."""
SPARE_SHARE = 0.25
"""Fraction by which the last evaluation, sample and save may take longer than the previous ones."""
MEMORY = 0.5
"""Fraction of the time left that is the time constant of the running mean of the speed: the closer
the end, the more the current speed counts."""
COMPILING = 2
"""Number of first steps of an attempt that are not measured, because they compile."""
RECURRING = ("evaluate", "tasks", "sample", "save")
"""Kinds of pauses that recur until the end of the run."""
MEASURED = ("working", "tokens", *RECURRING, "whole_save")
"""Names of what is measured: the seconds in steps and the tokens of these, both as exponentially
weighted sums; the last duration of each pause, for a save the time for which it blocked training;
and the seconds until a save is on the disk and verified."""


@dataclass
class TimeBudget:
    """Time budget of a run; decides on rank 0 when the decay starts, and so where it ends."""

    cfg: RunConfig
    schedule: WsdConfig
    tokens_before: TokensBefore
    limit: int
    """Maximum number of steps of the run."""
    clock: Clock
    measured: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURED, 0.0))
    """What `MEASURED` names; checkpoints keep it for the next attempt."""
    _mark: tuple[float, int] | None = None
    """Time worked, and step, at the last measurement."""
    _steps: int = 0
    """Steps of this attempt."""

    def left(self) -> float:
        """Return the seconds until the run must have ended."""
        assert self.cfg.train.budget is not None
        return self.clock.left(self.cfg.train.budget)

    def describe(self) -> str:
        """Return the time at which the run ends, as wall-clock time, formatted for messages."""
        left = self.left()
        local = datetime.fromtimestamp(time.time() + left, UTC).astimezone()
        ends = f"{local:%Y-%m-%d %H:%M:%S}, by step {self.limit} at the latest"
        if left > 0:
            return f"ends before {ends}"
        return f"should have ended before {ends}: only a short decay remains"

    def measure(self, step: int, left: float, worked: float, pauses: Mapping[str, float]) -> None:
        """Update the speed after step `step`, with `left` seconds left until the run must end.

        `worked` is a clock in seconds that excludes pauses. `pauses` is the last duration of
        each kind of pause; for a save, the time for which it blocked training.
        """
        self._steps += 1
        self.measured |= {part: seconds for part, seconds in pauses.items() if part in RECURRING}
        # The first call of an attempt has nothing to compare with.
        before, since = self._mark or (worked, step)
        if self._steps > COMPILING:
            # Older steps fade with time, not with their number, so that the batch size does not
            # matter. At least a second, as the weight would be undefined at the end.
            weight = math.exp((before - worked) / max(1.0, MEMORY * left))
            tokens = self.tokens_before(step) - self.tokens_before(since)
            self.measured["working"] = weight * self.measured["working"] + worked - before
            self.measured["tokens"] = weight * self.measured["tokens"] + tokens
        self._mark = worked, step

    def end(self, step: int, left: float) -> int:
        """Return the step that a run ends with whose decay starts now; 0 if it is too early."""
        latest = self.latest(step, left)
        # Backwards from the last possible step: the decay must end there, not begin there.
        begin = before_last(self.schedule.decay, latest, self.tokens_before)
        # A decay that cannot be long enough is still made: an undecayed end is worse.
        return 0 if begin > step else max(latest, min(step + SHORTEST, self.limit))

    def latest(self, step: int, left: float) -> int:
        """Return the last step with which the run, now after `step`, still ends in time."""
        # Nothing is measured yet. Then the limit of steps holds, unless time is up.
        if self.measured["tokens"] == 0.0:
            return self.limit if left > 0.0 else step
        steps = range(step, self.limit + 1)
        # Binary search: the estimate grows with the number of steps.
        return step + bisect_right(steps, left, key=lambda end: self.seconds(step, end)) - 1

    def seconds(self, step: int, end: int) -> float:
        """Return the estimated seconds from `step` to the end of a run that ends with step `end`.

        Includes evaluations, samples, saves and the end of the process.
        """
        of, cfg = self.measured, self.cfg
        tokens = self.tokens_before(end) - self.tokens_before(step)
        every = cfg.train.eval_every, cfg.eval.every, cfg.train.sample_every, cfg.checkpoint.every
        # The multiples of each period after `step` and before `end`.
        pauses = sum(
            of[kind] * max(0, (end - 1) // n - step // n)
            for kind, n in zip(RECURRING, every, strict=True)
            if n
        )
        # The last evaluation and save may be slower than before, on a machine that is busy at the
        # end.
        last = of["evaluate"] + of["tasks"] + of["sample"] + of["whole_save"]
        return (
            tokens * of["working"] / of["tokens"]
            + pauses
            + SPARE_SECONDS
            + (1 + SPARE_SHARE) * last
        )


@dataclass
class RunSchedule:
    """A schedule whose decay a time limit starts; without one it never changes.

    A run with a time limit starts without a decay. After each step rank 0 asks `proposed_end`, and
    when that is a step, all ranks call `end_at` with it, once.
    """

    steps: int
    """Number of steps to the end of the run; before the decay of a timed run, the maximum."""
    rates: ResolvedSchedule
    """Learning rates."""
    budget: TimeBudget | None = None
    """The time budget, on rank 0 of a run that a time limit ends."""
    ended_by: str | None = None
    """The action of the user's own that has ended the run before its last step."""

    def proposed_end(self, step: int, worked: float, pauses: Mapping[str, float]) -> int:
        """Return the step that the run ends with if its decay starts now; 0 if it does not.

        Call it after each `step`; the arguments are those of `TimeBudget.measure`.
        """
        if self.budget is None or self.rates.decay is not None:
            return 0
        left = self.budget.left()
        self.budget.measure(step, left, worked, pauses)
        return self.budget.end(step, left)

    def end_at(self, step: int, end: int) -> None:
        """Start the decay at `step`, and end the run with step `end`."""
        self.steps, self.rates = end, self.rates.with_decay(Decay(step, end))

    def end_now(self, step: int, by: str) -> None:
        """Make `step` the last one, without a decay: the action `by` has asked for it."""
        self.steps, self.ended_by = step, by

    def expected_steps(self, step: int) -> int:
        """Return the step that the run is expected to end with; an estimate before the decay."""
        if self.budget is None or self.rates.decay is not None:
            return self.steps
        return self.budget.latest(step, self.budget.left())

    def state(self) -> dict[str, Any]:
        """Return the fields of position.json that describe the schedule."""
        return {
            "warmup": self.rates.warmup,
            "decay": self.rates.decay and asdict(self.rates.decay),
            "speed": self.budget and self.budget.measured,
            "ended_by": self.ended_by,
        }
