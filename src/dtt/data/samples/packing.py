"""Best-fit packing of documents into fixed-length samples; only longer documents are divided.

The method is that of Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv
2404.10830): best-fit decreasing, made fast by counting documents by length. Here all documents of
one length are placed at once. Following the bin-packing literature, a sample is called a bin here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Packed samples: pieces of documents, grouped by bin and in text order within each bin."""

    first: Ints
    """[bins + 1]: index of the first piece of each bin, then the number of pieces."""
    start: Ints
    """[pieces]: index of each piece's first token in the token buffer."""
    length: Ints
    """[pieces]: number of tokens of each piece, 1 … capacity."""


Packing = Literal["concat", "best-fit", "none"]
"""The values of `data.packing`."""


def pack(bounds: Ints, capacity: int, how: Packing = "best-fit") -> Packed:
    """Pack the documents of a token buffer into bins of `capacity` tokens.

    `bounds` is [documents + 1]: document i is tokens bounds[i] … bounds[i + 1] - 1 of the buffer. A
    document longer than `capacity` is divided into full bins and a remainder, which is packed like
    a document. Every token is in exactly one bin. With "none", each piece has a bin of its own,
    but for single tokens. The result depends on the arguments only, and must stay the same in all
    versions of dtt.
    """
    tokens = np.diff(bounds)
    pieces = -(-tokens // capacity)
    document = np.repeat(np.arange(len(tokens)), pieces)
    within = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = bounds[document] + within * capacity
    length = np.minimum(bounds[document + 1] - start, capacity)
    if how == "none":
        several = length > 1  # one token alone has no target
        start, length = start[several], length[several]
        bins = np.arange(len(length))
    else:
        bins = best_fit(length, capacity)
    return grouped(start, length, bins)[0]


def grouped(start: Ints, length: Ints, bins: Ints) -> tuple[Packed, Ints]:
    """Return pieces grouped by `bins`, the bin of each, and their indices in that order.

    `start` must ascend, so that the pieces of a bin are in text order.
    """
    # Stable: pieces stay in text order, and the result is the same on every machine.
    order = np.argsort(bins, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64)
    return Packed(first, start[order], length[order]), order


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Return the bin of each item by best-fit decreasing; `lengths` [items] are in 1 … capacity.

    Items are placed in decreasing order of length, each into the bin with the least remaining room
    that fits it. A bin that has just taken an item is still the tightest one, so it takes as many
    items of that length as fit, and all bins with equal room take equally many. So one bulk
    assignment suffices for each pair of length and room.
    """
    # Longest first: short items fill the gaps that long ones leave.
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    open_bins = _Bins(capacity)
    # Counted by length: time grows with the number of distinct lengths, not with the number of
    # documents.
    counts = np.bincount(lengths, minlength=capacity + 1)
    placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = placed + int(counts[length])
        while placed < end:
            chosen = open_bins.take(length, end - placed)
            bins[order[placed : placed + len(chosen)]] = chosen
            placed += len(chosen)
    return bins


def least_slack(lengths: Ints, capacity: int) -> Ints:
    """Return the bin of each item by minimum bin slack; `lengths` [items] are in 1 … capacity.

    Each bin takes the longest remaining item, and then those items that together fill the rest best
    (Gupta and Ho 1999, "A new heuristic algorithm for the one-dimensional bin-packing problem").
    That is tighter than best fit for items of similar length, such as conversations: on GSM8K,
    99.8 % full instead of 97.4 % at 512 tokens. Lengths are counted, and a combination of lengths
    is used for as many bins as it can fill, so the time grows with the number of combinations. The
    result depends on the arguments only, and must stay the same in all versions of dtt.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    counts = np.bincount(lengths, minlength=capacity + 1)
    ends = np.cumsum(counts[::-1])[::-1]  # of the items of each length in `order`
    made = 0
    left: list[int] = counts.tolist()
    for longest in np.flatnonzero(counts)[::-1].tolist():
        while left[longest]:
            combination = _fullest(left, longest, capacity)
            # One search serves as many bins as these items can fill.
            times = min(left[length] // count for length, count in combination.items())
            for length, count in combination.items():
                stop = int(ends[length]) - left[length] + times * count
                chosen = np.repeat(np.arange(made, made + times), count)
                bins[order[stop - times * count : stop]] = chosen
                left[length] -= times * count
            made += times
    return bins


def _fullest(left: list[int], longest: int, capacity: int) -> dict[int, int]:
    """Return the items that fill a bin best next to one of length `longest`, as counts by length.

    `left` is the number of items of each length. The sums that some items can reach are the bits of
    an integer; the copies of a length are added in groups of 1, 2, 4, …, so that few are needed.
    """
    room = capacity - longest
    # Sums above the room are cut off, so the integer has at most capacity + 1 bits.
    limit = (1 << (room + 1)) - 1
    sums = 1
    groups: list[tuple[int, int, int]] = []  # (length, copies, the sums before them)
    for length in range(min(longest, room), 0, -1):
        copies = min(left[length] - (length == longest), room // length)
        size = 1
        while copies > 0:
            size = min(size, copies)
            groups.append((length, size, sums))
            sums |= (sums << (length * size)) & limit
            copies -= size
            size *= 2
        # The room can be filled exactly, so shorter items cannot improve it.
        if sums >> room:
            break
    rest = sums.bit_length() - 1
    found = {longest: 1}
    # Backwards through the groups: an item was used if the sum cannot be reached without it.
    for length, size, before in reversed(groups):
        if not before >> rest & 1:
            found[length] = found.get(length, 0) + size
            rest -= length * size
    return found


class _Bins:
    """The open bins, grouped by their remaining room in tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rooms: dict[int, list[Ints]] = {}
        self._there = 0
        """Bit r is set if there are bins with room for exactly r tokens.

        The lowest set bit ≥ length is the tightest fit.
        """
        self._made = 0

    def take(self, length: int, items: int) -> Ints:
        """Place up to `items` items of one length; return the bin of each placed item.

        Uses only the bins with the least remaining room that fits an item, or new bins if there are
        none. There may be too few such bins, so fewer items than `items` may be placed.
        """
        # An integer as a bit set: the tightest room is its lowest set bit, found without a loop.
        fitting = self._there >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else self._capacity
        each = room // length
        wanted = -(-items // each)
        if fitting:
            groups = self._rooms[room]
            group = groups.pop()
            bins = group[:wanted]
            if len(group) > wanted:
                groups.append(group[wanted:])
            elif not groups:
                self._there ^= 1 << room
        else:
            bins = np.arange(self._made, self._made + wanted)
            self._made += wanted
        full, rest = divmod(items, each)
        # The bins may not suffice; the caller places the rest elsewhere.
        if len(bins) * each <= items:
            self._put(bins, room - each * length)
            return np.repeat(bins, each)
        self._put(bins[:full], room - each * length)
        self._put(bins[full:], room - rest * length)
        return np.repeat(bins, each)[:items]

    def _put(self, bins: Ints, room: int) -> None:
        if room and len(bins):
            self._rooms.setdefault(room, []).append(bins)
            self._there |= 1 << room
