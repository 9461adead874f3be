"""Pass 2: exact groups and candidate pairs, by partitions of the keys of all units.

A partition is a range of key values. As keys are hashes, partitions are about equally large; their
number follows from the number of keys, never from the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.clean.document_order import UNIT_BITS, DocumentOrder, DocumentSet
from dtt.clean.shingles import U64
from dtt.clean.steps import Steps, inputs_key
from dtt.clean.unit_pass import ENTRY, EXACT, Entries

PARTITION_ENTRIES = 2**20
"""Average number of keys of a partition. One takes 60 to 500 bytes for each, the more the more
documents share keys: up to 0.5 GB. Equal keys are in one partition, however many there are: ten
million copies of a document take 1 GB."""
GATHERED_BYTES = 2**28
"""Keys of several partitions that a rank takes from the units at once: each unit is opened for 21
partitions of band keys at a time, or 12 of exact keys."""
GATHERED_ROWS = 2**23
"""Pairs of several units that a rank takes from the partitions at once; sorting takes 0.4 GB."""
FIRST_FEW = 8
"""Number of earlier documents of a group with the same band key with which each one is compared, so
that a group of n documents makes at most 8 n pairs, not n². Exact copies do not count."""
PAIR = np.dtype([("later", "<u8"), ("earlier", "<u8")])
"""Two documents."""

Pairs = npt.NDArray[Any]


def exact_partitions(order: DocumentOrder) -> int:
    """Return the number of partitions of exact keys."""
    return _partitions(sum(order.counts))


def band_partitions(order: DocumentOrder) -> int:
    """Return the number of partitions of band keys."""
    return _partitions(sum(sum(facts["runs"]) for facts in order.facts))


def _partitions(entries: int) -> int:
    return max(1, -(-entries // PARTITION_ENTRIES))


def partition_groups(entry: np.dtype[Any], partitions: int, ranks: int) -> list[range]:
    """Return groups of partitions that one rank does in one pass over the units.

    The result does not depend on the groups. They save opens: with one partition a group, there
    would be 88 million for a corpus of 1 TB.
    """
    most = max(1, GATHERED_BYTES // (PARTITION_ENTRIES * entry.itemsize))
    size = min(most, -(-partitions // ranks))
    return [range(i, min(i + size, partitions)) for i in range(0, partitions, size)]


def exact_groups(order: DocumentOrder, steps: Steps, group: range, partitions: int) -> None:
    """Write the documents whose text equals an earlier one's, and the first one of each group.

    Does so for each partition of `group`.
    """

    def runs(_: int, entries: Entries) -> list[int]:
        return [len(entries)]

    blocks = _Blocks(order, steps, "exact", EXACT, group, partitions, runs)
    for partition in group:
        _exact_groups(order, steps, partition, *blocks.of(partition))


def _exact_groups(
    order: DocumentOrder, steps: Steps, partition: int, entries: Entries, number: U64
) -> None:
    high, low = (np.ascontiguousarray(entries[half]) for half in ("high", "low"))
    name, key = f"exact-{partition:05d}", inputs_key([order.own], high, low, number)
    if steps.done(name, key):
        return
    sorting = np.lexsort((number, low, high))
    high, low, number = high[sorting], low[sorting], number[sorting]
    starts = np.ones(len(number), np.bool_)
    starts[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    first = number[np.maximum.accumulate(np.where(starts, np.arange(len(number)), 0))]
    later = ~starts & order.is_own(number)
    _write_pairs(steps, name, key, number[later], first[later])


def candidate_pairs(
    order: DocumentOrder, steps: Steps, copies: DocumentSet, group: range, partitions: int
) -> None:
    """Write pairs of documents with a common band key; leave out exact copies of earlier ones.

    Does so for each partition of `group`.
    """

    def runs(place: int, _: Entries) -> list[int]:
        found: list[int] = order.facts[place]["runs"]
        return found

    blocks = _Blocks(order, steps, "keys", ENTRY, group, partitions, runs)
    for partition in group:
        entries, number = blocks.of(partition)
        kept = ~copies.contains(number)
        _candidate_pairs(order, steps, partition, entries["key"][kept], number[kept])


def _candidate_pairs(
    order: DocumentOrder, steps: Steps, partition: int, keys: U64, number: U64
) -> None:
    name, key = f"pairs-{partition:05d}", inputs_key([order.own, FIRST_FEW], keys, number)
    if steps.done(name, key):
        return
    sorting = np.argsort(keys, kind="stable")  # numbers ascend in each group
    keys, number = keys[sorting], number[sorting]
    starts = np.ones(len(keys), np.bool_)
    starts[1:] = keys[1:] != keys[:-1]
    start = np.maximum.accumulate(np.where(starts, np.arange(len(keys)), 0))
    position = np.arange(len(keys)) - start
    own = order.is_own(number)
    laters, earliers = [number[:0]], [number[:0]]
    for place in range(FIRST_FEW):
        chosen = np.flatnonzero((position > place) & own)
        laters.append(number[chosen])
        earliers.append(number[start[chosen] + place])
    _write_pairs(steps, name, key, np.concatenate(laters), np.concatenate(earliers))


class _Blocks:
    """The entries of a group of partitions: of each sorted run, those of all its partitions."""

    def __init__(
        self,
        order: DocumentOrder,
        steps: Steps,
        ending: str,
        dtype: np.dtype[Any],
        group: range,
        partitions: int,
        runs: Callable[[int, Entries], list[int]],
    ) -> None:
        """Open each unit once; `runs` returns the lengths of the sorted runs of a unit."""
        self._order, self._first, self._empty = order, group.start, np.empty(0, dtype)
        self._blocks: list[tuple[int, Entries, list[int]]] = []
        """Place of the unit, the entries, and where each partition starts and ends in them."""
        field = str((dtype.names or ())[0])
        lows = [-(-(i << 32) // partitions) << 32 for i in range(group.start, group.stop + 1)]
        for place, unit in enumerate(order.units):
            entries = steps.array(unit.step, ending, dtype)
            first = 0
            for length in runs(place, entries):
                run = entries[first : first + length]
                keys = run[field]  # sorted by their upper 32 bits
                # Not np.searchsorted, which copies all keys that lie between other numbers.
                edges = [bisect_left(keys, low, key=int) for low in lows]
                # A copy, as a view keeps its file open, and a process may open about 1,000.
                block = run[edges[0] : edges[-1]].copy()
                self._blocks.append((place, block, [edge - edges[0] for edge in edges]))
                first += length

    def of(self, partition: int) -> tuple[Entries, U64]:
        """Return the entries of a partition, in the order of units, and their documents."""
        at = partition - self._first
        found = [(n, block[edges[at] : edges[at + 1]]) for n, block, edges in self._blocks]
        numbers = [self._order.numbers(n, part["document"]) for n, part in found]
        entries = np.concatenate([self._empty, *(part for _, part in found)])
        return entries, np.concatenate([np.empty(0, np.uint64), *numbers])


def _unique(pairs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the different pairs, or documents, sorted."""
    if pairs.dtype != PAIR:
        return np.unique(pairs)
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["later"]))]
    return pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs


def _write_pairs(steps: Steps, name: str, key: str, later: U64, earlier: U64) -> None:
    """Write the different pairs, sorted, and also the sorted earlier documents."""
    pairs = np.empty(len(later), PAIR)
    pairs["later"], pairs["earlier"] = later, earlier
    steps.write(name, key, {"pairs": [_unique(pairs)], "earlier": [np.unique(earlier)]})


def pairs_of_units(
    order: DocumentOrder, steps: Steps, kind: str, partitions: int, places: Sequence[int]
) -> Iterator[tuple[int, Pairs]]:
    """Yield each place with the different pairs whose later document is in its unit, sorted."""
    files = [(f"{kind}-{partition:05d}", "pairs") for partition in range(partitions)]
    yield from _of_units(order, steps, files, PAIR, places)


def documents_in_pairs(
    order: DocumentOrder, steps: Steps, partitions: int, places: Sequence[int]
) -> Iterator[tuple[int, U64]]:
    """Yield each place with the documents of its unit in a candidate pair, ascending."""
    files = [(f"pairs-{partition:05d}", "earlier") for partition in range(partitions)]
    earlier = _of_units(order, steps, files, np.dtype(np.uint64), places)
    laters = pairs_of_units(order, steps, "pairs", partitions, places)
    for (place, pairs), (_, numbers) in zip(laters, earlier, strict=True):
        yield place, np.unique(np.concatenate([pairs["later"], numbers]))


def _of_units(
    order: DocumentOrder,
    steps: Steps,
    files: Sequence[tuple[str, str]],
    dtype: np.dtype[Any],
    places: Sequence[int],
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield each place with the different rows of its unit in all files, sorted.

    Each file is opened once to count rows, and once for as many units as have GATHERED_ROWS.
    """
    units = len(order.units)

    def rows() -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
        for name, ending in files:
            found = steps.array(name, ending, dtype)
            yield found, (_numbers(found) >> UNIT_BITS).astype(np.int64)

    counts = np.zeros(units, np.int64)
    for _, place_of in rows():
        counts += np.bincount(place_of, minlength=units)
    before = np.cumsum(counts[list(places)]) - counts[list(places)]
    for _, group in groupby(zip(places, before // GATHERED_ROWS, strict=True), itemgetter(1)):
        some = [place for place, _ in group]
        wanted = np.isin(np.arange(units), some)
        found = [np.empty(0, dtype), *(all_rows[wanted[of]] for all_rows, of in rows())]
        sorted_rows = _unique(np.concatenate(found))
        found.clear()
        numbers = np.ascontiguousarray(_numbers(sorted_rows))
        for place in some:
            edges = np.array([place, place + 1], np.uint64) << UNIT_BITS
            yield place, sorted_rows[slice(*np.searchsorted(numbers, edges).tolist())]


def _numbers(rows: npt.NDArray[Any]) -> U64:
    """Return the document whose unit a row belongs to."""
    numbers: U64 = rows["later"] if rows.dtype == PAIR else rows
    return numbers
