"""The mixture of sources: assigns a source to each sample of a run, from weights and sizes alone.

A phase is a range of samples in which the weights are constant. Within a phase the sources follow a
repeating pattern: after any number of the phase's samples, each source has had its share of them to
within one sample. Each phase restarts the pattern, so these differences can add up over several
phases. The source at position k of the run is found in O(1).
"""

from __future__ import annotations

import heapq
import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
OnExhausted = Literal["repeat", "stop", "renormalise"]
Weights = tuple[Fraction, ...]
"""One weight per source; only their proportions matter."""

LONGEST_PATTERN = 100_000
"""Maximum period of a pattern in samples; weights that need a longer one are rounded to it."""


def shares(weights: Weights) -> tuple[int, ...]:
    """Return the number of samples of each source in one period of the pattern.

    The numbers are in the exact proportion of the weights if the period is at most LONGEST_PATTERN.
    Otherwise they are rounded by the largest-remainder method to LONGEST_PATTERN samples in total,
    and every source with a positive weight has at least one.
    """
    # Exact integers: with floats, the common denominator would be huge; fractions are 30 times as
    # slow, and a run may have a phase for each of hundreds of sources.
    scale = math.lcm(*(weight.denominator for weight in weights))
    parts = [weight.numerator * (scale // weight.denominator) for weight in weights]
    total, common = sum(parts), math.gcd(*parts)
    if total // common <= LONGEST_PATTERN:
        return tuple(part // common for part in parts)
    # At least one sample: a source that the user named must not vanish through rounding.
    counts = [max(1, part * LONGEST_PATTERN // total) if part else 0 for part in parts]
    missing = LONGEST_PATTERN - sum(counts)
    excess = [
        count * total - part * LONGEST_PATTERN for count, part in zip(counts, parts, strict=True)
    ]
    for source in sorted(range(len(counts)), key=excess.__getitem__)[: max(0, missing)]:
        counts[source] += 1
    # More were given out than there are: the largest share can spare them best.
    counts[counts.index(max(counts))] += min(0, missing)
    return tuple(counts)


class SourcePattern:
    """One period of the repeating order of sources in a phase, computed as far as it is used.

    A phase may end long before its pattern does: with hundreds of sources that are exhausted one
    after the other, complete patterns would take most of the time. Threads may share a pattern.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        """Take the samples of each source in the period."""
        self.counts: Ints = np.array(counts)
        """[sources]: samples of each source in the period."""
        self.period = sum(counts)
        self._slots = _slots(counts)
        self._order = np.empty((0, 2), dtype=np.int32)
        self._lock = threading.Lock()

    def first(self, slots: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the source of each of the first slots, and its earlier samples in the period.

        There may be more than `slots` of them, which is at most the period.
        """
        with self._lock:
            have = len(self._order)
            if slots > have:
                # At least twice as many, so that growing takes linear time.
                more = islice(self._slots, max(slots, 2 * have) - have)
                added = np.fromiter(more, dtype=np.dtype((np.int32, 2)))
                self._order = np.concatenate([self._order, added])
            return self._order[:, 0], self._order[:, 1]


@lru_cache(maxsize=32)
def pattern(counts: tuple[int, ...]) -> SourcePattern:
    """Return the pattern in which each source has its `counts` of samples in a period."""
    return SourcePattern(counts)


def _slots(counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (source, its earlier samples) in an order in which every prefix holds each share.

    Each source has its share of a prefix to within one sample. `counts` are the samples of each
    source in the period. The order is Tijdeman's chairman assignment (1980) as in Pfair scheduling
    (Baruah et al. 1996): in a period of P samples, sample i (from 0) of a source with n samples may
    be placed in slot floor(i P / n) or later, and must be placed before slot ceil((i + 1) P / n).
    Earliest-deadline-first scheduling meets all deadlines.
    """
    period = sum(counts)
    done = [0] * len(counts)
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
        yield source, done[source]
        done[source] += 1
        # Released when its ideal position is reached; this bounds the lead of a source, as the
        # deadline bounds its lag.
        heapq.heappush(waiting, (done[source] * period // counts[source], source))


@dataclass(frozen=True)
class WeightsPhase:
    """A range of positions of the run with one pattern."""

    first: int
    """First position of the phase."""
    consumed: Ints
    """[sources]: samples of each source before the phase."""
    weights: Weights

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Samples of each source in a period of the pattern."""
        return shares(self.weights)

    @property
    def pattern(self) -> SourcePattern:
        """The pattern of the phase, which is not kept: hundreds of them would take 100s of MB."""
        return pattern(self.shares)

    def counts(self, position: int) -> Ints:
        """Return [sources]: samples of each source before `position`, which is in this phase."""
        order = self.pattern
        periods, slot = divmod(position - self.first, order.period)
        # At most one period is counted, so the cost does not grow with the position.
        part = np.bincount(order.first(slot)[0][:slot], minlength=len(self.consumed))
        return self.consumed + periods * order.counts + part

    def first_exhausted(self, sizes: Ints, stop: int) -> tuple[int, int] | None:
        """Return the source that first completes its epoch, and the position at which it does.

        Return None if no source does up to position `stop`. Sources whose samples are used up have
        no share in the phase.
        """
        order = self.pattern
        share = order.counts
        periods, ranks = np.divmod(sizes - self.consumed - 1, np.maximum(share, 1))
        # A slot is less than a period, so the number of periods decides first.
        least = int(periods[share > 0].min())
        wanted = np.where((share > 0) & (periods == least), ranks, -1)
        start = self.first + least * order.period
        last = min(stop - start, order.period)
        seen, slots = 0, min(last, 64)
        while seen < last:
            sources, earlier = (part[seen:last] for part in order.first(slots))
            found = np.flatnonzero(wanted[sources] == earlier)
            if len(found):
                slot = seen + int(found[0])
                return int(sources[found[0]]), start + slot + 1
            seen += len(sources)
            slots = min(last, 2 * seen)
        return None


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
        self.on_exhausted = on_exhausted
        self.end = samples
        """Number of samples of the run: `samples`, or fewer if sources are exhausted earlier."""
        self.phases = self._plan(np.array(sizes, dtype=np.int64), list(weights))
        self._firsts = [phase.first for phase in self.phases]

    def _plan(self, sizes: Ints, weights: list[tuple[int, Weights]]) -> list[WeightsPhase]:
        phases: list[WeightsPhase] = []
        gone: set[int] = set()  # exhausted sources, which are not repeated
        first, consumed = 0, np.zeros_like(sizes)
        while first < self.end:
            # The last change at or before this position holds.
            given = next(w for start, w in reversed(weights) if start <= first)
            left = tuple(Fraction(0) if i in gone else w for i, w in enumerate(given))
            if not any(left):
                self.end = first
                break
            phase = WeightsPhase(first, consumed, left)
            phases.append(phase)
            # The nearest event ends the phase: a change of weights, an exhausted source, or the
            # end.
            first = min([self.end, *(start for start, _ in weights if start > first)])
            if self.on_exhausted != "repeat":
                ended = phase.first_exhausted(sizes, first)
                if ended is not None:
                    source, first = ended
                    gone.add(source)
            if gone and self.on_exhausted == "stop":
                self.end = first
            consumed = phase.counts(first)
        return phases

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
            order = phase.pattern
            periods, slots = np.divmod(index, order.period)
            of_slot, earlier = order.first(int(slots.max()) + 1)
            rows = slice(filled, filled + here)
            sources[rows] = of_slot[slots]
            places[rows] = (
                phase.consumed[sources[rows]]
                + periods * order.counts[sources[rows]]
                + earlier[slots]
            )
            filled += here
        return sources, places

    def counts(self, position: int) -> Ints:
        """Return [sources]: samples of each source before a position."""
        return self.phases[bisect_right(self._firsts, position) - 1].counts(position)
