"""Ending in time: when the decay begins, and where it ends, by the clock and the measured speed."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dtt.config.schedule import WsdConfig
from dtt.config.train import TrainConfig
from dtt.optim.schedule import Decay, TokensBefore, before_last
from dtt.train.clock import Clock

SHORTEST = 5
"""Steps that a decay keeps, however late it is: a rate that drops at once anneals nothing."""
SPARE_SECONDS = 5.0
"""For the end of the process, after the last save."""
SPARE_SHARE = 0.25
"""What the last evaluation, sample and save may take longer than they last did."""
MEMORY = 0.5
"""Share of the time left in which what was measured loses weight by a factor of e: the nearer the
end, the more counts what steps take now."""
TOLERANCE = 0.05
"""Share of what remains by which a decay may end early before it is stretched again."""
RECURRING = ("evaluate", "sample", "save")
"""Pauses that come again."""
COMPILING = 2
"""Steps of an attempt that say nothing of its speed."""


@dataclass(frozen=True)
class Speed:
    """What things take, as last measured; a checkpoint keeps it for the next attempt. Seconds."""

    working: float = 0.0
    """In steps; old ones weigh less …"""
    tokens: float = 0.0
    """… as do the tokens of those steps."""
    evaluate: float = 0.0
    sample: float = 0.0
    save: float = 0.0
    """For which a save holds up training."""
    whole_save: float = 0.0
    """Until one is on the disk and verified."""

    def after(self, seconds: float, tokens: int, memory: float) -> Speed:
        """With steps of so many tokens; `memory` is the time in which old ones lose weight."""
        weight = math.exp(-seconds / memory)
        return replace(
            self, working=weight * self.working + seconds, tokens=weight * self.tokens + tokens
        )


@dataclass
class Budget:
    """Decides, on the first rank, when the decay begins and where the run ends."""

    train: TrainConfig
    schedule: WsdConfig
    save_every: int
    tokens_before: TokensBefore
    limit: int
    """The last step there may be."""
    clock: Clock
    speed: Speed = field(default_factory=Speed)
    _mark: tuple[float, int] | None = None
    """Time worked, and step, when it was last looked at."""
    _steps: int = 0

    def left(self) -> float:
        """Seconds until the run must have ended; ConfigError as `Clock.left`."""
        return self.clock.left(self.train)

    def describe(self) -> str:
        """When it ends, by the clock on the wall."""
        left = self.left()
        local = datetime.fromtimestamp(time.time() + left, UTC).astimezone()
        ends = f"{local:%Y-%m-%d %H:%M:%S}, at the latest with step {self.limit}"
        if left > 0:
            return f"ends before {ends}"
        return f"should have ended before {ends}: all that is left is a short decay"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self.speed)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the speed of an earlier attempt."""
        self.speed = Speed(**{part: state[part] for part in asdict(Speed()) if part in state})

    def took(self, **seconds: float) -> None:
        """Something else than a step took so long."""
        self.speed = replace(self.speed, **seconds)

    def measure(self, step: int, left: float, worked: float, pauses: Mapping[str, float]) -> None:
        """`step` steps are done, `left` as given by `left`; `worked`: a clock that runs in steps.

        `pauses`: what each kind last took; for a save, holding up training.
        """
        self._steps += 1
        self.took(**{part: took for part, took in pauses.items() if part in RECURRING})
        before, since = self._mark or (worked, step)
        if self._steps > COMPILING and step > since:  # else the run went back to an earlier one
            tokens = self.tokens_before(step) - self.tokens_before(since)
            memory = max(1.0, MEMORY * left)
            self.speed = self.speed.after(worked - before, tokens, memory)
        self._mark = worked, step

    def end(self, step: int, left: float, decay: Decay | None) -> int:
        """The step the run should now end with; 0: nothing changes.

        Without a `decay` an answer begins one. It is made shorter at once when time gets scarce,
        longer only when much is left.
        """
        latest = self.latest(step, left)
        if decay is None:
            begin = before_last(self.schedule.decay, latest, self.tokens_before)
            return 0 if begin > step else self._no_sooner(step, latest, self.limit)
        if latest < decay.end:
            nearest = self._no_sooner(step, latest, decay.end)
            return 0 if nearest == decay.end else nearest
        slack = 1 + TOLERANCE * (decay.end - step)
        return latest if latest > decay.end + slack else 0

    def _no_sooner(self, step: int, latest: int, most: int) -> int:
        return max(latest, min(step + SHORTEST, most))

    def latest(self, step: int, left: float) -> int:
        """The last step with which the run, now after `step`, still ends in time."""
        if self.speed.tokens == 0.0:
            return self.limit if left > 0.0 else step
        steps = range(step, self.limit + 1)
        return step + bisect_right(steps, left, key=lambda end: self.seconds(step, end)) - 1

    def seconds(self, step: int, end: int) -> float:
        """What it takes from `step` to the end of a run that ends with step `end`."""
        speed, train = self.speed, self.train
        tokens = self.tokens_before(end) - self.tokens_before(step)
        last = speed.evaluate + speed.sample + speed.whole_save
        return (
            tokens * speed.working / speed.tokens
            + speed.evaluate * _between(step, end, train.eval_every)
            + speed.sample * _between(step, end, train.sample_every)
            + speed.save * _between(step, end, self.save_every)
            + SPARE_SECONDS
            + (1 + SPARE_SHARE) * last
        )


def _between(step: int, end: int, every: int) -> int:
    """How often something that is due every so many steps is, after `step` and before `end`."""
    return max(0, (end - 1) // every - step // every) if every else 0
