"""Best-fit packing: whole documents into bins, of which only those longer than a bin are cut.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), who pack best
fit decreasing and count documents by length to do so fast. Here documents of one length are placed
all at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Pieces of documents, bin by bin, in the order of the text within each."""

    first: Ints
    """[bins + 1]: the first piece of each bin, then the number of pieces."""
    start: Ints
    """[pieces]: first token."""
    length: Ints
    """[pieces]: tokens, 1 … capacity."""


def pack(bounds: Ints, capacity: int) -> Packed:
    """Documents bounds[i] … bounds[i + 1] - 1 of a row of tokens, in bins of `capacity` tokens.

    A longer document is cut into full bins and a rest, which is placed as a document is. Every
    token is in exactly one bin. The same for the same arguments, in any version.
    """
    tokens = np.diff(bounds)
    pieces = -(-tokens // capacity)
    document = np.repeat(np.arange(len(tokens)), pieces)
    within = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = bounds[document] + within * capacity
    length = np.minimum(bounds[document + 1] - start, capacity)
    bins = best_fit(length, capacity)
    order = np.argsort(bins, kind="stable")
    counts = np.bincount(bins)
    return Packed(np.concatenate([[0], np.cumsum(counts)]), start[order], length[order])


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """The bin of each item, best fit decreasing; `lengths` lie in 1 … capacity.

    Longest first, each item goes into the bin with the least room that holds it. Once such a bin
    took an item it is the tightest one still, so it takes all it can of that length, and all bins
    of equal room take equally many: one assignment in bulk for each pair of length and room.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    open_bins = _Bins(capacity)
    counts = np.bincount(lengths, minlength=capacity + 1)
    placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = placed + int(counts[length])
        while placed < end:
            chosen = open_bins.take(length, end - placed)
            bins[order[placed : placed + len(chosen)]] = chosen
            placed += len(chosen)
    return bins


class _Bins:
    """Bins by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rooms: dict[int, list[Ints]] = {}
        self._there = 0
        """Bit r: there are bins with room for r tokens. The lowest that fits is the tightest."""
        self._made = 0

    def take(self, length: int, items: int) -> Ints:
        """Bins for at most `items` items of one length, all of the tightest room; one an item."""
        fitting = self._there >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else self._capacity
        each = room // length
        wanted = -(-items // each)
        bins = self._of(room, wanted) if fitting else self._new(wanted)
        full, rest = divmod(items, each)
        if len(bins) * each <= items:
            self._put(bins, room - each * length)
            return np.repeat(bins, each)
        self._put(bins[:full], room - each * length)
        self._put(bins[full:], room - rest * length)
        return np.repeat(bins, each)[:items]

    def _new(self, count: int) -> Ints:
        self._made += count
        return np.arange(self._made - count, self._made)

    def _of(self, room: int, count: int) -> Ints:
        """At most `count` bins of a room, out of it."""
        groups = self._rooms[room]
        group = groups.pop()
        if len(group) > count:
            groups.append(group[count:])
        elif not groups:
            self._there ^= 1 << room
        return group[:count]

    def _put(self, bins: Ints, room: int) -> None:
        if room and len(bins):
            self._rooms.setdefault(room, []).append(bins)
            self._there |= 1 << room
