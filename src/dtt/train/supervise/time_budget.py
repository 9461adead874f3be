"""Time budget of a run: when to start the decay so that the run ends before its time limit."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dtt.config.schedule import Decay, TokensBefore, before_last
from dtt.config.train import TrainConfig
from dtt.jobs.clock import Clock
from dtt.optim.lr_curves import WsdConfig

SHORTEST = 5
"""Minimum steps of a decay, however late it is: a sudden drop of the rate does not anneal."""
SPARE_SECONDS = 5.0
"""Seconds reserved for the end of the process, after the last save."""
SPARE_SHARE = 0.25
"""Fraction by which the last evaluation, sample and save may take longer than the previous ones."""
MEMORY = 0.5
"""Fraction of the time left that is the time constant of the running mean of the speed: the closer
the end, the more the current speed counts."""
TOLERANCE = 0.05
"""Fraction of the remaining steps by which a decay may end early before it is extended again."""
RECURRING = ("evaluate", "tasks", "sample", "save")
"""Kinds of pauses that recur until the end of the run."""
COMPILING = 2
"""Number of first steps of an attempt that are not measured, because they compile."""


@dataclass(frozen=True)
class Speed:
    """Measured durations in seconds; checkpoints keep them for the next attempt."""

    working: float = 0.0
    """Time spent in steps, as an exponentially weighted sum."""
    tokens: float = 0.0
    """Tokens of these steps, with the same weights."""
    evaluate: float = 0.0
    """Duration of the last evaluation."""
    tasks: float = 0.0
    """Duration of the last evaluation of benchmark tasks."""
    sample: float = 0.0
    """Duration of the last sample."""
    save: float = 0.0
    """Time for which the last save blocked training."""
    whole_save: float = 0.0
    """Time until a save is on the disk and verified: the longest of the last ones."""

    def after(self, seconds: float, tokens: int, memory: float) -> Speed:
        """Return the speed with another `seconds` of steps of `tokens` tokens added.

        `memory` is the time constant in seconds of the weights of earlier steps.
        """
        # Older steps fade with time, not with their number, so that the batch size does not matter.
        weight = math.exp(-seconds / memory)
        return replace(
            self, working=weight * self.working + seconds, tokens=weight * self.tokens + tokens
        )


@dataclass
class TimeBudget:
    """Time budget of a run; decides on rank 0 when the decay starts and at which step it ends."""

    train: TrainConfig
    schedule: WsdConfig
    save_every: int
    tokens_before: TokensBefore
    limit: int
    """Maximum number of steps of the run."""
    clock: Clock
    tasks_every: int = 0
    """Steps between evaluations of benchmark tasks; 0: only at the end."""
    speed: Speed = field(default_factory=Speed)
    _mark: tuple[float, int] | None = None
    """Time worked, and step, at the last measurement."""
    _steps: int = 0
    """Steps of this attempt."""

    def left(self) -> float:
        """Return the seconds until the run must have ended."""
        assert self.train.budget is not None
        return self.clock.left(self.train.budget)

    def describe(self) -> str:
        """Return the time at which the run ends, as wall-clock time, formatted for messages."""
        left = self.left()
        local = datetime.fromtimestamp(time.time() + left, UTC).astimezone()
        ends = f"{local:%Y-%m-%d %H:%M:%S}, by step {self.limit} at the latest"
        if left > 0:
            return f"ends before {ends}"
        return f"should have ended before {ends}: only a short decay remains"

    def state(self) -> dict[str, Any]:
        """Return the measured speed as kept in a checkpoint."""
        return asdict(self.speed)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the speed measured by an earlier attempt."""
        self.speed = Speed(**{part: state[part] for part in asdict(Speed()) if part in state})

    def set_durations(self, **seconds: float) -> None:
        """Set measured durations other than that of steps, keyed by the field names of `Speed`."""
        self.speed = replace(self.speed, **seconds)

    def measure(self, step: int, left: float, worked: float, pauses: Mapping[str, float]) -> None:
        """Update the speed after step `step`, with `left` seconds left until the run must end.

        `worked` is a clock in seconds that excludes pauses. `pauses` is the last duration of
        each kind of pause; for a save, the time for which it blocked training.
        """
        self._steps += 1
        self.set_durations(
            **{part: seconds for part, seconds in pauses.items() if part in RECURRING}
        )
        # The first call of an attempt has nothing to compare with.
        before, since = self._mark or (worked, step)
        if self._steps > COMPILING and step > since:
            tokens = self.tokens_before(step) - self.tokens_before(since)
            # At least a second, as the weight would be undefined at the end.
            memory = max(1.0, MEMORY * left)
            # `worked` excludes pauses, which are counted one by one below.
            self.speed = self.speed.after(worked - before, tokens, memory)
        self._mark = worked, step

    def end(self, step: int, left: float, decay: Decay | None) -> int:
        """Return the step that the run should end with; 0 if its end does not change.

        Without a `decay`, a result other than 0 starts one after `step`. A decay is shortened as
        soon as time is short, and extended only by more than `TOLERANCE` of its remaining steps.
        """
        latest = self.latest(step, left)
        if decay is None:
            # Backwards from the last possible step: the decay must end there, not begin there.
            begin = before_last(self.schedule.decay, latest, self.tokens_before)
            # A decay that cannot be long enough is still made: an undecayed end is worse.
            return 0 if begin > step else self._at_least_shortest(step, latest, self.limit)
        if latest < decay.end:
            nearest = self._at_least_shortest(step, latest, decay.end)
            return 0 if nearest == decay.end else nearest
        # Each extension changes the rate: small gains of time are not worth a change.
        slack = 1 + TOLERANCE * (decay.end - step)
        return latest if latest > decay.end + slack else 0

    def _at_least_shortest(self, step: int, latest: int, most: int) -> int:
        return max(latest, min(step + SHORTEST, most))

    def latest(self, step: int, left: float) -> int:
        """Return the last step with which the run, now after `step`, still ends in time."""
        # Nothing is measured yet. Then the limit of steps holds, unless time is up.
        if self.speed.tokens == 0.0:
            return self.limit if left > 0.0 else step
        steps = range(step, self.limit + 1)
        # Binary search: the estimate grows with the number of steps.
        return step + bisect_right(steps, left, key=lambda end: self.seconds(step, end)) - 1

    def seconds(self, step: int, end: int) -> float:
        """Return the estimated seconds from `step` to the end of a run that ends with step `end`.

        Includes evaluations, samples, saves and the end of the process.
        """
        speed, train = self.speed, self.train
        tokens = self.tokens_before(end) - self.tokens_before(step)
        # The last evaluation and save may be slower than before, on a machine that is busy at the
        # end.
        last = speed.evaluate + speed.tasks + speed.sample + speed.whole_save
        return (
            tokens * speed.working / speed.tokens
            + speed.evaluate * _between(step, end, train.eval_every)
            + speed.tasks * _between(step, end, self.tasks_every)
            + speed.sample * _between(step, end, train.sample_every)
            + speed.save * _between(step, end, self.save_every)
            + SPARE_SECONDS
            + (1 + SPARE_SHARE) * last
        )


def _between(step: int, end: int, every: int) -> int:
    """Return the number of multiples of `every` after `step` and before `end`; 0 if it is 0."""
    return max(0, (end - 1) // every - step // every) if every else 0
