"""Which source each sample of a run comes from: a pure function of weights and sizes.

A phase is a stretch of the run in which weights stay the same. In it the sources follow one another
in a pattern that repeats: after any number of its samples, each source has had its share of them to
within one sample. Each phase begins its pattern anew, so over several phases these differences may
add up. Position k of the run is found in O(1).
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
"""One for each source; only their proportions count."""

LONGEST_PATTERN = 100_000
"""Weights whose common period is longer are rounded to so many parts."""
MOVED = Fraction(1, 100)
"""Rounding that moves a share by a larger part of itself is worth a warning."""


def shares(weights: Weights) -> tuple[int, ...]:
    """Samples of each source in one pattern.

    In exact proportion, or rounded by largest remainders to LONGEST_PATTERN samples in all, of
    which a source with a weight has at least one.
    """
    total = sum(weights)
    exact = [weight / total for weight in weights]
    length = math.lcm(*(share.denominator for share in exact))
    if length <= LONGEST_PATTERN:
        return tuple(int(share * length) for share in exact)
    ideal = [share * LONGEST_PATTERN for share in exact]
    counts = [max(1, math.floor(x)) if x else 0 for x in ideal]
    missing = LONGEST_PATTERN - sum(counts)
    for source in sorted(range(len(counts)), key=lambda i: counts[i] - ideal[i])[: max(0, missing)]:
        counts[source] += 1
    counts[counts.index(max(counts))] += min(0, missing)
    return tuple(counts)


@dataclass(frozen=True)
class Pattern:
    """One period of a phase."""

    counts: Ints
    """[sources]: samples of each."""
    sources: Ints
    """[period]: whose sample it is."""
    ranks: Ints
    """[period]: how many of the same source come before it."""


@lru_cache(maxsize=256)
def pattern(counts: tuple[int, ...]) -> Pattern:
    """The sources in an order in which every prefix holds each one's share to within one sample.

    Tijdeman's chairman assignment (1980) as in Pfair scheduling (Baruah et al. 1996): with P
    samples in all, sample i of a source that has n (i from 0) may come from slot floor(i P / n) on
    and must come before slot ceil((i + 1) P / n). Taking the earliest deadline first meets all.
    """
    period = sum(counts)
    sources, ranks, done = [], [], [0] * len(counts)
    waiting = [(0, source) for source, count in enumerate(counts) if count]
    ready: list[tuple[int, int]] = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source = heapq.heappop(waiting)
            deadline = -(-(done[source] + 1) * period // counts[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        sources.append(source)
        ranks.append(done[source])
        done[source] += 1
        heapq.heappush(waiting, (done[source] * period // counts[source], source))
    return Pattern(np.array(counts), np.array(sources), np.array(ranks))


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one pattern."""

    first: int
    """Position at which it begins."""
    consumed: Ints
    """[sources]: samples of each source before."""
    weights: Weights
    pattern: Pattern

    def counts(self, position: int) -> Ints:
        """[sources]: samples of each source before `position`, which lies in this phase."""
        periods, slot = divmod(position - self.first, len(self.pattern.sources))
        part = np.bincount(self.pattern.sources[:slot], minlength=len(self.consumed))
        return self.consumed + periods * self.pattern.counts + part

    def after(self, source: int, count: int) -> int | None:
        """The position before which `source` first has had `count` samples, more than before.

        As if the phase had no end; None when the source has no share in it.
        """
        share = int(self.pattern.counts[source])
        if share == 0:
            return None
        periods, rank = divmod(count - int(self.consumed[source]) - 1, share)
        slot = int(np.flatnonzero(self.pattern.sources == source)[rank])
        return self.first + periods * len(self.pattern.sources) + slot + 1


@dataclass(frozen=True)
class Rounded:
    """A share of the samples that rounding moved by more than MOVED of itself."""

    source: int
    phase: Phase
    asked: Fraction
    taken: Fraction


class Mixture:
    """The order of the sources in a run."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[tuple[int, Weights]],
        on_exhausted: OnExhausted,
        samples: int,
    ) -> None:
        """`sizes`: samples in an epoch of each source; `weights`: from which position on they hold,
        ascending from 0; `samples`: the run takes no more than so many.
        """
        self.sizes = tuple(sizes)
        self.on_exhausted = on_exhausted
        self.end = samples
        """Samples of the run: as many as asked for, or until sources are exhausted."""
        self.phases = self._plan(list(weights))
        self._firsts = [phase.first for phase in self.phases]

    def _plan(self, weights: list[tuple[int, Weights]]) -> list[Phase]:
        phases: list[Phase] = []
        gone: set[int] = set()  # sources that are exhausted and do not come again
        first, consumed = 0, np.zeros(len(self.sizes), dtype=np.int64)
        while first < self.end:
            given = next(w for start, w in reversed(weights) if start <= first)
            left = tuple(Fraction(0) if i in gone else w for i, w in enumerate(given))
            if not any(left):
                self.end = first
                break
            phase = Phase(first, consumed, left, pattern(shares(left)))
            phases.append(phase)
            ends = self._ends(phase)
            changes = [start for start, _ in weights if start > first]
            first = min([self.end, *changes, *ends.values()])
            gone |= {source for source, end in ends.items() if end == first}
            if gone and self.on_exhausted == "stop":
                self.end = first
            consumed = phase.counts(first)
        return phases

    def _ends(self, phase: Phase) -> dict[int, int]:
        """Where the sources of `phase` would be exhausted, if none of them begins anew."""
        if self.on_exhausted == "repeat":
            return {}
        ends = ((source, phase.after(source, size)) for source, size in enumerate(self.sizes))
        return {source: end for source, end in ends if end is not None}

    def places(self, first: int, count: int) -> tuple[Ints, Ints]:
        """For positions first … first + count - 1: the source, and the place in its own order."""
        sources, places = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        filled = 0
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
        """[sources]: samples of each source before a position."""
        return self._phase(position).counts(position)

    def rounded(self) -> list[Rounded]:
        """Return the shares, phase by phase, that differ by more than MOVED from the weights."""
        found = []
        for phase in self.phases:
            total, period = sum(phase.weights), len(phase.pattern.sources)
            for source, weight in enumerate(phase.weights):
                asked = weight / total
                taken = Fraction(int(phase.pattern.counts[source]), period)
                if abs(taken - asked) > MOVED * asked:
                    found.append(Rounded(source, phase, asked, taken))
        return found

    def exhausted_after(self, source: int) -> int | None:
        """Samples of the run after which all of `source` has been seen once; None: never."""
        for phase, end in zip(self.phases, [*self._firsts[1:], self.end], strict=True):
            position = phase.after(source, self.sizes[source])
            if position is not None and position <= end:
                return position
        return None

    def _phase(self, position: int) -> Phase:
        return self.phases[bisect_right(self._firsts, position) - 1]
