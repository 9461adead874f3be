"""Pass 2: exact groups and candidate pairs, by partitions of the keys of all units.

A partition is a range of key values. As keys are hashes, partitions are about equally large; their
number follows from the number of keys, never from the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.clean.document_order import DocumentOrder, DocumentSet
from dtt.clean.shingles import U64
from dtt.clean.steps import Steps, inputs_key
from dtt.clean.unit_pass import ENTRY, EXACT

PARTITION_ENTRIES = 2**20
"""Average number of keys of a partition. One takes 60 to 500 bytes for each, the more the more
documents share keys: up to 0.5 GB. Equal keys are in one partition, however many there are: ten
million copies of a document take 1 GB."""
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


def exact_groups(order: DocumentOrder, steps: Steps, partition: int, partitions: int) -> None:
    """Write the documents whose text equals an earlier one's, and the first one of each group."""
    found, numbers = [np.empty(0, EXACT)], [np.empty(0, np.uint64)]
    for place, unit in enumerate(order.units):
        entries = steps.array(unit.step, "exact", EXACT)
        found.append(entries[_slice(entries["high"], partition, partitions)].copy())
        numbers.append(order.numbers(place, found[-1]["document"]))
    high, low = (np.concatenate([some[half] for some in found]) for half in ("high", "low"))
    number = np.concatenate(numbers)
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
    order: DocumentOrder,
    steps: Steps,
    copies: DocumentSet,
    partition: int,
    partitions: int,
) -> None:
    """Write pairs of documents with a common band key; leave out exact copies of earlier ones."""
    found = list(_band_entries(order, steps, partition, partitions))
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in found)])
    number = np.concatenate([np.empty(0, np.uint64), *(number for _, number in found)])
    found.clear()
    kept = ~copies.contains(number)
    keys, number = keys[kept], number[kept]
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


def _band_entries(
    order: DocumentOrder, steps: Steps, partition: int, partitions: int
) -> Iterator[tuple[U64, U64]]:
    for place, unit in enumerate(order.units):
        entries = steps.array(unit.step, "keys", ENTRY)
        first = 0
        for length in order.facts[place]["runs"]:
            run = entries[first : first + length]
            part = run[_slice(run["key"], partition, partitions)]
            yield part["key"].copy(), order.numbers(place, part["document"])
            first += length


def _slice(keys: U64, partition: int, partitions: int) -> slice:
    """Return where the keys of a partition are among keys sorted by their upper 32 bits.

    Callers copy the slice: a view keeps its file open, and a process may open about 1,000.
    """
    low, high = (-(-(i << 32) // partitions) << 32 for i in (partition, partition + 1))
    # Not np.searchsorted, which copies all keys that lie between other numbers.
    return slice(bisect_left(keys, low, key=int), bisect_left(keys, high, key=int))


def _unique(pairs: Pairs) -> Pairs:
    """Return the different pairs, sorted."""
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["later"]))]
    return pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs


def _write_pairs(steps: Steps, name: str, key: str, later: U64, earlier: U64) -> None:
    """Write the different pairs, sorted, and also the sorted earlier documents."""
    pairs = np.empty(len(later), PAIR)
    pairs["later"], pairs["earlier"] = later, earlier
    steps.write(name, key, {"pairs": [_unique(pairs)], "earlier": [np.unique(earlier)]})


def pairs_of_unit(steps: Steps, kind: str, partitions: int, place: int) -> Pairs:
    """Return the different pairs whose later document is in the unit at a place, sorted."""
    found = [np.empty(0, PAIR)]
    for partition in range(partitions):
        pairs = steps.array(f"{kind}-{partition:05d}", "pairs", PAIR)
        found.append(pairs[_of_unit(pairs["later"], place)].copy())
    return _unique(np.concatenate(found))


def documents_in_pairs(steps: Steps, partitions: int, place: int) -> U64:
    """Return the documents of the unit at a place that are in a candidate pair, ascending."""
    found = [pairs_of_unit(steps, "pairs", partitions, place)["later"]]
    for partition in range(partitions):
        numbers = steps.array(f"pairs-{partition:05d}", "earlier", np.uint64)
        found.append(numbers[_of_unit(numbers, place)].copy())
    return np.unique(np.concatenate(found))


def _of_unit(numbers: U64, place: int) -> slice:
    return slice(*(bisect_left(numbers, edge << 32, key=int) for edge in (place, place + 1)))
