"""The mixture of sources: assigns a source to each sample of a run, from weights and sizes alone.

A phase is a range of samples in which the weights are constant. Within a phase the sources follow a
repeating pattern: after any number of the phase's samples, each source has had its share of them to
within one sample. Each phase restarts the pattern, so these differences can add up over several
phases. The source at position k of the run is found in O(1).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
OnExhausted = Literal["repeat", "stop", "renormalise"]
Weights = tuple[Fraction, ...]
"""One weight per source; only their proportions matter."""

LONGEST_PATTERN = 100_000
"""Maximum period of a pattern in samples; weights that need a longer one are rounded to it."""
MOVED = Fraction(1, 100)
"""Relative change of a share through rounding above which dtt warns."""


def shares(weights: Weights) -> tuple[int, ...]:
    """Return the number of samples of each source in one period of the pattern.

    The numbers are in the exact proportion of the weights if the period is at most LONGEST_PATTERN.
    Otherwise they are rounded by the largest-remainder method to LONGEST_PATTERN samples in total,
    and every source with a positive weight has at least one.
    """
    total = sum(weights)
    # Exact fractions: with floats, the least common multiple of the denominators would be huge.
    exact = [weight / total for weight in weights]
    length = math.lcm(*(share.denominator for share in exact))
    if length <= LONGEST_PATTERN:
        return tuple(int(share * length) for share in exact)
    ideal = [share * LONGEST_PATTERN for share in exact]
    # At least one sample: a source that the user named must not vanish through rounding.
    counts = [max(1, math.floor(x)) if x else 0 for x in ideal]
    missing = LONGEST_PATTERN - sum(counts)
    for source in sorted(range(len(counts)), key=lambda i: counts[i] - ideal[i])[: max(0, missing)]:
        counts[source] += 1
    # More were given out than there are: the largest share can spare them best.
    counts[counts.index(max(counts))] += min(0, missing)
    return tuple(counts)


@dataclass(frozen=True)
class Pattern:
    """One period of the repeating order of sources in a phase."""

    counts: Ints
    """[sources]: samples of each source in the period."""
    sources: Ints
    """[period]: source of each sample."""
    ranks: Ints
    """[period]: number of earlier samples of the same source in the period."""


@lru_cache(maxsize=256)
def pattern(counts: tuple[int, ...]) -> Pattern:
    """Return an order in which every prefix has each source's share to within one sample.

    `counts` are the samples of each source in the period. The order is Tijdeman's chairman
    assignment (1980) as in Pfair scheduling (Baruah et al. 1996): in a period of P samples, sample
    i (from 0) of a source with n samples may be placed in slot floor(i P / n) or later, and must be
    placed before slot ceil((i + 1) P / n). Earliest-deadline-first scheduling meets all deadlines.
    """
    period = sum(counts)
    sources, ranks, done = [], [], [0] * len(counts)
    # Heap of (release slot, source): sources whose next sample may not be placed yet.
    waiting = [(0, source) for source, count in enumerate(counts) if count]
    ready: list[tuple[int, int]] = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source = heapq.heappop(waiting)
            # The latest slot for the next sample that keeps the prefix within one sample of its
            # share.
            deadline = -(-(done[source] + 1) * period // counts[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        sources.append(source)
        ranks.append(done[source])
        done[source] += 1
        # Released when its ideal position is reached; this bounds the lead of a source, as the
        # deadline bounds its lag.
        heapq.heappush(waiting, (done[source] * period // counts[source], source))
    return Pattern(np.array(counts), np.array(sources), np.array(ranks))


@dataclass(frozen=True)
class Phase:
    """A range of positions of the run with one pattern."""

    first: int
    """First position of the phase."""
    consumed: Ints
    """[sources]: samples of each source before the phase."""
    weights: Weights
    pattern: Pattern

    def counts(self, position: int) -> Ints:
        """Return [sources]: samples of each source before `position`, which is in this phase."""
        periods, slot = divmod(position - self.first, len(self.pattern.sources))
        # At most one period is counted, so the cost does not grow with the position.
        part = np.bincount(self.pattern.sources[:slot], minlength=len(self.consumed))
        return self.consumed + periods * self.pattern.counts + part

    def after(self, source: int, count: int) -> int | None:
        """Return the number of samples of the run after which `source` has had `count` of them.

        `count` must exceed the samples of the source before the phase. The phase is assumed never
        to end. Returns None if the source has no share in the phase.
        """
        share = int(self.pattern.counts[source])
        if share == 0:
            return None
        periods, rank = divmod(count - int(self.consumed[source]) - 1, share)
        slot = int(np.flatnonzero(self.pattern.sources == source)[rank])
        return self.first + periods * len(self.pattern.sources) + slot + 1


class Mixture:
    """The order of the sources in a run."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[tuple[int, Weights]],
        on_exhausted: OnExhausted,
        samples: int,
    ) -> None:
        """Plan the phases of a run.

        `sizes` are the samples per epoch of each source. `weights` are pairs of a position, from
        which the weights hold, and the weights; positions ascend and start at 0. `samples` is the
        maximum number of samples of the run.
        """
        self.sizes = tuple(sizes)
        self.on_exhausted = on_exhausted
        self.end = samples
        """Number of samples of the run: `samples`, or fewer if sources are exhausted earlier."""
        self.phases = self._plan(list(weights))
        self._firsts = [phase.first for phase in self.phases]

    def _plan(self, weights: list[tuple[int, Weights]]) -> list[Phase]:
        phases: list[Phase] = []
        gone: set[int] = set()  # exhausted sources, which are not repeated
        first, consumed = 0, np.zeros(len(self.sizes), dtype=np.int64)
        while first < self.end:
            # The last change at or before this position holds.
            given = next(w for start, w in reversed(weights) if start <= first)
            left = tuple(Fraction(0) if i in gone else w for i, w in enumerate(given))
            if not any(left):
                self.end = first
                break
            phase = Phase(first, consumed, left, pattern(shares(left)))
            phases.append(phase)
            ends = self._ends(phase)
            changes = [start for start, _ in weights if start > first]
            # The nearest event ends the phase: a change of weights, an exhausted source, or the
            # end.
            first = min([self.end, *changes, *ends.values()])
            gone |= {source for source, end in ends.items() if end == first}
            if gone and self.on_exhausted == "stop":
                self.end = first
            consumed = phase.counts(first)
        return phases

    def _ends(self, phase: Phase) -> dict[int, int]:
        """Return the position at which each source of `phase` is exhausted; {} if sources repeat.

        Assumes that `phase` does not end before.
        """
        if self.on_exhausted == "repeat":
            return {}
        ends = ((source, phase.after(source, size)) for source, size in enumerate(self.sizes))
        return {source: end for source, end in ends if end is not None}

    def places(self, first: int, count: int) -> tuple[Ints, Ints]:
        """Return, for positions first … first + count - 1, the source and the position in it.

        Both arrays are [count].
        """
        sources, places = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        filled = 0
        # A batch may cross a phase; each part is looked up with array operations.
        while filled < count:
            number = bisect_right(self._firsts, first + filled) - 1
            phase, following = self.phases[number], self._firsts[number + 1 : number + 2]
            here = min([count - filled, *(start - first - filled for start in following)])
            index = np.arange(here) + (first + filled - phase.first)
            periods, slots = np.divmod(index, len(phase.pattern.sources))
            rows = slice(filled, filled + here)
            sources[rows] = phase.pattern.sources[slots]
            places[rows] = (
                phase.consumed[sources[rows]]
                + periods * phase.pattern.counts[sources[rows]]
                + phase.pattern.ranks[slots]
            )
            filled += here
        return sources, places

    def counts(self, position: int) -> Ints:
        """Return [sources]: samples of each source before a position."""
        return self._phase(position).counts(position)

    def rounded(self) -> list[tuple[int, Phase, Fraction, Fraction]]:
        """Return the shares of each phase that rounding changed by more than MOVED of themselves.

        Each is the source, the phase, the share by the weights, and the one in the pattern.
        """
        found = []
        for phase in self.phases:
            total, period = sum(phase.weights), len(phase.pattern.sources)
            for source, weight in enumerate(phase.weights):
                asked = weight / total
                taken = Fraction(int(phase.pattern.counts[source]), period)
                if abs(taken - asked) > MOVED * asked:
                    found.append((source, phase, asked, taken))
        return found

    def exhausted_after(self, source: int) -> int | None:
        """Return the samples of the run after which `source` completes its first epoch, or None."""
        for phase, end in zip(self.phases, [*self._firsts[1:], self.end], strict=True):
            position = phase.after(source, self.sizes[source])
            if position is not None and position <= end:
                return position
        return None

    def _phase(self, position: int) -> Phase:
        return self.phases[bisect_right(self._firsts, position) - 1]
