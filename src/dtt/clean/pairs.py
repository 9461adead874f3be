"""Passes 2 and 3: pairs of documents that are equal or similar, found in ranges of keys.

Pass 2 finds groups of equal keys in partitions: ranges of key values. As keys are hashes,
partitions are about equally large; their number follows from the number of keys, never from the
number of ranks. Pass 3 computes the exact Jaccard similarity of the candidate pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.base.errors import DamagedError
from dtt.clean.shingles import U64, Int, shingles
from dtt.clean.steps import OPEN_FILES, Files, Rows, SortedFile, SortedFiles, Steps, merged
from dtt.clean.unit_pass import ENTRY, EXACT, PlacedUnit
from dtt.config.clean import NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_batches

PARTITION_ENTRIES = 2**20
"""Average number of keys of a partition. One takes 60 to 500 bytes for each, the more the more
documents share keys: up to 0.5 GB. Equal keys are in one partition, however many there are: ten
million copies of a document take 1 GB."""
FIRST_FEW = 8
"""Number of earlier documents of a group with the same band key with which each one is compared, so
that a group of n documents makes at most 8 n pairs, not n². Exact copies do not count."""
SHINGLES_AT_ONCE = 2**20
"""Number of shingles of the pairs that are compared at once."""
PAIR = np.dtype([("later", "<u8"), ("earlier", "<u8")])
"""Two documents."""
SCORED = np.dtype([*PAIR.descr, ("score", "<f8")])
"""Two documents and their Jaccard similarity."""
DOCUMENT = np.dtype([("number", "<u8")])
UNIT_BITS, IN_UNIT = np.uint64(32), np.uint64(2**32 - 1)

Pairs = npt.NDArray[Any]


class DocumentOrder:
    """All units in order, after pass 1: the corpora of `near.against`, then the corpus itself.

    A document's number in it is `place of its unit << 32 | number in the unit`.
    """

    def __init__(self, units: Sequence[PlacedUnit], steps: Steps) -> None:
        """Read the number of documents of each unit; collective."""
        self.units = units
        comm = steps.comm
        # Each marker is read by one rank: all of them by each would be ranks × units opens.
        shares = comm.gather([steps.facts(unit.step) for unit in units[comm.rank :: comm.size]])
        self.facts = [shares[i % comm.size][i // comm.size] for i in range(len(units))]
        self.counts = [int(facts["documents"]) for facts in self.facts]
        self.starts = np.cumsum([0, *self.counts])
        self.own = sum(unit.other is not None for unit in units)
        """Place of the first unit of the corpus that is cleaned."""
        self.bounds = [place << 32 for place in range(len(units) + 1)]
        """Bounds of the numbers of the documents of each unit."""

    def is_own(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Return which documents belong to the corpus that is cleaned."""
        return numbers >= np.uint64(self.own << 32)

    def twin(self, number: int) -> tuple[int, int]:
        """Return `twin_unit` and `twin` of a document, as the file of a unit has them."""
        place, document = number >> 32, number & (2**32 - 1)
        other = self.units[place].other
        if other is None:
            return self.units[place].unit.index, document
        first = next(i for i, unit in enumerate(self.units) if unit.other == other)
        return -1 - other, int(self.starts[place] - self.starts[first]) + document


class DocumentSet:
    """A set of documents, one bit for each."""

    def __init__(self, order: DocumentOrder) -> None:
        self._starts = order.starts
        self._bits = np.zeros(int(order.starts[-1]) // 8 + 1, np.uint8)

    def _positions(self, numbers: U64) -> npt.NDArray[np.int64]:
        places = (numbers >> UNIT_BITS).astype(np.int64)
        return self._starts[places] + (numbers & IN_UNIT).astype(np.int64)

    def add(self, numbers: U64) -> None:
        """Add documents."""
        at = self._positions(numbers)
        np.bitwise_or.at(self._bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))

    def contains(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Return which documents are in the set."""
        at = self._positions(numbers)
        found: npt.NDArray[np.bool_] = (self._bits[at >> 3] >> (at & 7) & 1).astype(np.bool_)
        return found

    def add_one(self, number: int) -> None:
        """Add a document; for one, this is ten times as fast as `add`."""
        at = int(self._starts[number >> 32]) + (number & (2**32 - 1))
        self._bits[at >> 3] |= 1 << (at & 7)

    def has(self, number: int) -> bool:
        """Return True if the document is in the set."""
        at = int(self._starts[number >> 32]) + (number & (2**32 - 1))
        return bool(self._bits[at >> 3] >> (at & 7) & 1)


def find_pairs(near: NearConfig | None, order: DocumentOrder, steps: Steps) -> list[SortedFile]:
    """Do passes 2 and 3; return the files of the pairs of exact copies; collective.

    The similar pairs whose later document is in the unit at place i are in the step `verified-i`.
    """
    files = _exact_copies(order, steps)
    if near is None:
        return files
    copies = DocumentSet(order)
    for pairs in SortedFiles(steps, files, PAIR).chunks(order.bounds):
        copies.add(pairs["later"])
    candidates, documents = _candidate_pairs(order, steps, copies)
    sets = ShingleSets(order, steps)
    sets.write(near, SortedFiles(steps, documents, DOCUMENT))
    opened = SortedFiles(steps, candidates, PAIR)
    steps.each(
        [f"verified-{place:05d}" for place in range(len(order.units))],
        lambda place: {"pairs": [_verified(sets, near, pairs_of_unit(opened, place))]},
    )
    return files


def _exact_copies(order: DocumentOrder, steps: Steps) -> list[SortedFile]:
    """Write the documents whose text equals an earlier one's, with the first one; collective.

    Returns the files of these pairs.
    """

    def pairs(rows: Rows) -> Files:
        high, low, number = (np.ascontiguousarray(rows[name]) for name in ("high", "low", "number"))
        sorting = np.lexsort((number, low, high))
        high, low, number = high[sorting], low[sorting], number[sorting]
        first = number[_first_of_group(high, low)]
        later = (number != first) & order.is_own(number)
        return {"pairs": [_different(_pairs(number[later], first[later]))]}

    bounds = _partition_bounds(sum(order.counts))
    units = [SortedFile(unit.step, "exact") for unit in order.units]
    keys = SortedFiles(steps, merged(steps, "exact", units, EXACT, bounds), EXACT)
    names = _partitions(steps, "exact", keys, bounds, pairs)
    files = [SortedFile(name, "pairs") for name in names]
    return merged(steps, "copies", files, PAIR, order.bounds)


def _candidate_pairs(
    order: DocumentOrder, steps: Steps, copies: DocumentSet
) -> tuple[list[SortedFile], list[SortedFile]]:
    """Write pairs of documents with a common band key; leave out exact copies of earlier ones.

    Collective. Returns the files of the pairs, and those of the documents in them. Both may have
    a row several times, as two documents often share several keys.
    """

    def pairs(rows: Rows) -> Files:
        number = np.ascontiguousarray(rows["number"])
        kept = ~copies.contains(number)
        keys, number = rows["key"][kept], number[kept]
        sorting = np.argsort(keys, kind="stable")  # numbers ascend in each group
        keys, number = keys[sorting], number[sorting]
        start = _first_of_group(keys)
        position = np.arange(len(keys)) - start
        own = order.is_own(number)
        found = [np.empty(0, PAIR)]
        for place in range(FIRST_FEW):
            chosen = np.flatnonzero((position > place) & own)
            found.append(_pairs(number[chosen], number[start[chosen] + place]))
        several = _different(np.concatenate(found))
        return {"pairs": [several], "documents": [np.unique(several.view(np.uint64))]}

    runs = [facts["runs"] for facts in order.facts]
    bounds = _partition_bounds(sum(map(sum, runs)))
    units = [SortedFile(u.step, "keys", some) for u, some in zip(order.units, runs, strict=True)]
    keys = SortedFiles(steps, merged(steps, "keys", units, ENTRY, bounds), ENTRY)
    names = _partitions(steps, "pairs", keys, bounds, pairs)
    files, documents = ([SortedFile(name, e) for name in names] for e in ("pairs", "documents"))
    return (
        merged(steps, "pairs", files, PAIR, order.bounds),
        merged(steps, "documents", documents, DOCUMENT, order.bounds),
    )


def _partition_bounds(entries: int) -> list[int]:
    """Return the bounds of the partitions of so many keys, multiples of 2^32."""
    count = max(1, -(-entries // PARTITION_ENTRIES))
    return [-(-(i << 32) // count) << 32 for i in range(count + 1)]


def _partitions(
    steps: Steps,
    kind: str,
    keys: SortedFiles,
    bounds: Sequence[int],
    pairs: Callable[[Rows], Files],
) -> list[str]:
    """Write the files that `pairs` makes of each partition; return the names of the steps.

    Collective.
    """
    names = [f"{kind}-{partition:05d}" for partition in range(len(bounds) - 1)]
    steps.each(names, lambda i: pairs(keys.between(bounds[i], bounds[i + 1])))
    return names


def _first_of_group(*columns: U64) -> Int:
    """Return the place of the first row of each row's group: rows with equal values, in order."""
    starts = np.ones(len(columns[0]), np.bool_)
    starts[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first: Int = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
    return first


def _pairs(later: U64, earlier: U64) -> Pairs:
    pairs = np.empty(len(later), PAIR)
    pairs["later"], pairs["earlier"] = later, earlier
    return pairs


def _different(pairs: Pairs) -> Pairs:
    """Return the different pairs, sorted."""
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["later"]))]
    return pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs


def pairs_of_unit(pairs: SortedFiles, place: int) -> Pairs:
    """Return the different pairs whose later document is in the unit at a place, sorted."""
    return _different(pairs.between(place << 32, place + 1 << 32))


class ShingleSets:
    """The shingle sets of all documents in candidate pairs, by blocks of units.

    A block has one file: the sets, where each ends, the numbers of the documents, and how many
    there are. A document may resemble one of any other unit, and few files can be held open: with
    a file for each unit, units that share much text would be opened again and again, units² times.
    """

    def __init__(self, order: DocumentOrder, steps: Steps) -> None:
        """Divide the units into at most OPEN_FILES blocks."""
        self._order, self._steps = order, steps
        self._size = -(-len(order.units) // OPEN_FILES)
        count = -(-len(order.units) // self._size)
        self._names = [f"shingles-{block:05d}" for block in range(count)]
        self._opened: dict[int, tuple[U64, U64, U64]] = {}

    def write(self, near: NearConfig, documents: SortedFiles) -> None:
        """Read the units with `documents` again and write their sets; collective."""
        places = range(len(self._order.units))

        def sets(block: int) -> Files:
            first = block * self._size
            return {"sets": self._sets(near, places[first : first + self._size], documents)}

        self._steps.each(self._names, sets)

    def _sets(self, near: NearConfig, places: range, documents: SortedFiles) -> Iterator[U64]:
        """Yield the content of the file of a block."""
        numbers, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for place in places:
            wanted = np.unique(documents.between(place << 32, place + 1 << 32)["number"])
            numbers.append(wanted)
            texts = self._texts(place, (wanted & IN_UNIT).astype(np.int64))
            for some in texts if len(wanted) else ():
                cut = shingles(some, near.shingle)
                edges = np.searchsorted(cut.document, np.arange(len(some) + 1))
                sizes = np.empty(len(some), np.uint64)
                for i, (first, last) in enumerate(pairwise(edges.tolist())):
                    found = np.sort(cut.hashes[first:last])  # np.unique takes five times as long
                    found = found[np.append(True, found[1:] != found[:-1])]
                    sizes[i] = len(found)
                    yield found
                lengths.append(sizes)
        yield np.cumsum(np.concatenate(lengths), dtype=np.uint64)
        yield np.concatenate(numbers)
        yield np.array([sum(map(len, numbers))], np.uint64)

    def _texts(self, place: int, wanted: Int) -> Iterator[list[bytes]]:
        """Yield the texts of the wanted documents; raise DamagedError if the corpus has changed."""
        placed = self._order.units[place]
        sizes = self._steps.array(placed.step, "sizes", np.uint32)
        first = 0
        for batch in read_batches(placed.corpus, placed.unit, BadDocuments()):
            expected = sizes[first : first + len(batch)].tolist()
            if list(map(len, batch)) != expected:
                break
            low, high = np.searchsorted(wanted, [first, first + len(batch)])
            if high > low:
                yield [batch[number - first] for number in wanted[low:high].tolist()]
            first += len(batch)
        else:
            if first == len(sizes):
                return
        raise DamagedError(
            "the corpus has changed while it was cleaned",
            where=placed.corpus.folder,
            why=f"unit {placed.unit.index} has other documents than before",
            next="dtt download again, then the same command",
        )

    def of(self, number: int) -> U64:
        """Return the sorted shingle set of a document."""
        block = (number >> 32) // self._size
        if block not in self._opened:
            content = self._steps.array(self._names[block], "sets", np.uint64)
            count = int(content[-1])
            ends, numbers = content[-1 - 2 * count : -1].reshape(2, count)
            self._opened[block] = content, ends, numbers
        content, ends, numbers = self._opened[block]
        at = int(np.searchsorted(numbers, np.uint64(number)))
        return content[int(ends[at - 1]) if at else 0 : int(ends[at])]


def _verified(sets: ShingleSets, near: NearConfig, pairs: Pairs) -> Pairs:
    """Return the pairs whose Jaccard similarity reaches the threshold, and its value."""
    verified = [np.empty(0, SCORED)]
    batch: list[tuple[U64, U64]] = []
    first = size = 0
    kept = np.ones(len(pairs), np.bool_)
    for place, (a, b) in enumerate(pairs.tolist()):
        one, two = sets.of(a), sets.of(b)
        # Sets of such different sizes cannot be similar enough.
        kept[place] = min(len(one), len(two)) / max(len(one), len(two)) >= near.threshold
        if kept[place]:
            batch.append((one, two))
            size += len(one) + len(two)
        if batch and (size >= SHINGLES_AT_ONCE or place == len(pairs) - 1):
            some = pairs[first : place + 1][kept[first : place + 1]]
            found = np.empty(len(some), SCORED)
            found["later"], found["earlier"] = some["later"], some["earlier"]
            found["score"] = jaccard(batch)
            verified.append(found[found["score"] >= near.threshold])
            batch, first, size = [], place + 1, 0
    return np.concatenate(verified)


def jaccard(pairs: list[tuple[U64, U64]]) -> npt.NDArray[np.float64]:
    """Return the Jaccard similarity of pairs of sorted sets that are not empty.

    All pairs are compared at once: the number of the pair replaces the lowest bits of each hash. A
    million shingles leave at least 44 bits of each in short documents, and 60 in long ones.
    """
    bits = np.uint64(max(1, (len(pairs) - 1).bit_length()))
    one_sizes, two_sizes = (np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
    numbers = np.arange(len(pairs), dtype=np.uint64) << (np.uint64(64) - bits)
    sides = [
        np.concatenate([pair[side] for pair in pairs]) >> bits | np.repeat(numbers, sizes)
        for side, sizes in ((0, one_sizes), (1, two_sizes))
    ]
    merged = np.sort(np.concatenate(sides), kind="stable")  # merges the two sorted halves
    shared = merged[1:][merged[1:] == merged[:-1]] >> (np.uint64(64) - bits)
    common = np.bincount(shared.astype(np.int64), minlength=len(pairs))
    similarity: npt.NDArray[np.float64] = common / (one_sizes + two_sizes - common)
    return similarity
