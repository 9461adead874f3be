"""The schedule of a run: the chosen one with its warm-up, number of steps and decay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtt.base.reading import is_kind
from dtt.config.own import own_code
from dtt.config.schedule import (
    Decay,
    RunFacts,
    Schedule,
    TokensBefore,
    first_steps,
)
from dtt.optim.lr_curves import ConstantConfig

CONSTANT = ConstantConfig().curve
DECAY = {"begin": int, "end": int}
"""Fields of a `Decay` in a checkpoint, and their types."""


@dataclass(frozen=True)
class ResolvedSchedule:
    """A schedule resolved for a run. Steps count from 0."""

    config: Schedule
    facts: RunFacts

    @property
    def warmup(self) -> int:
        """Number w of warm-up steps: the first has 1/w of the peak rate, the last the full peak."""
        return self.facts.warmup

    @property
    def decay(self) -> Decay | None:
        """The decay; None: the rate stays at the peak, or the time budget has not started it."""
        return self.facts.decay

    @property
    def name(self) -> str:
        """Name of the curve."""
        begin = self.config.begin(self.facts)
        return CONSTANT if begin is None or begin >= self.facts.steps else self.config.curve

    def multiplier(self, step: int) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        with own_code(self.config, "schedule"):
            rate = self.config.multiplier(step, self.facts)
            if not (is_kind(rate, float) and 0 <= rate < math.inf):
                raise ValueError(f"multiplier({step}, run) returned {rate}, no rate of 0 or more")
        # The first update has a rate above 0: a step without effect would be wasted. The smaller
        # one, as the inverse square root begins to fall at the last step of the warm-up.
        warmup = self.facts.warmup
        return min((step + 1) / warmup, rate) if step < warmup else rate

    def with_decay(self, decay: Decay | None) -> ResolvedSchedule:
        """Return the same schedule with another decay."""
        return replace(self, facts=replace(self.facts, decay=decay))

    @property
    def waits(self) -> bool:
        """True if the time budget has not started the decay yet."""
        return self.decay is None and self.name != CONSTANT

    def describe(self) -> str:
        """Return a one-line summary; it counts steps from 1, as logs do."""
        start = f"warm-up until step {self.warmup}, " if self.warmup else ""
        if self.decay is None:
            return start + (f"decay ({self.name}) in time" if self.waits else self.name)
        last = self.decay.end
        share = f"{100 * self.multiplier(last - 1):.3g}% of the peak in step {last}"
        return f"{start}decay ({self.name}) from step {self.decay.begin + 1}, {share}"


def resolve_schedule(config: Schedule, steps: int, tokens_before: TokensBefore) -> ResolvedSchedule:
    """Resolve a schedule for a run of `steps` steps."""
    facts = RunFacts(steps, first_steps(config.warmup, steps, tokens_before), tokens_before)
    begin = config.begin(facts)
    # Otherwise no step is left to decay in: the warm-up takes the whole run, or the decay is 0
    # steps long.
    if begin is not None and begin < steps:
        facts = replace(facts, decay=Decay(begin, steps))
    return ResolvedSchedule(config, facts)
