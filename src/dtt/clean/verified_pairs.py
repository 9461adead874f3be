"""Pass 3: the exact Jaccard similarity of candidate pairs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dtt.base.errors import DamagedError
from dtt.clean.document_order import IN_UNIT, UNIT_BITS, DocumentOrder
from dtt.clean.partitions import PAIR, Pairs
from dtt.clean.shingles import U64, Int, shingles
from dtt.clean.steps import Content, Steps, inputs_key
from dtt.config.clean import NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_batches

SHINGLES_AT_ONCE = 2**20
"""Number of shingles of the pairs that are compared at once."""
OPEN_UNITS = 100
"""Units of whose shingles three files are mapped at a time; a process may open about 1,000."""
SCORED = np.dtype([*PAIR.descr, ("score", "<f8")])
"""Two documents and their Jaccard similarity."""


class ShingleSets(NamedTuple):
    """The shingle sets of those documents of a unit that are in candidate pairs."""

    documents: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    hashes: U64

    def of(self, document: int) -> U64:
        """Return the sorted shingle set of a document."""
        at = int(np.searchsorted(self.documents, document))
        return self.hashes[self.ends[at - 1] if at else 0 : self.ends[at]]


def units_to_compare(
    order: DocumentOrder, steps: Steps, near: NearConfig, place: int, pairs: Pairs
) -> list[int] | None:
    """Return the places of the units whose shingle sets `verified_pairs` needs for a unit.

    `pairs` are the candidate pairs of the unit.
    None if its pairs are verified, here or in another selection of the corpus.
    """
    key = _pairs_key(order, steps, near, pairs)
    if steps.done(f"verified-{place:05d}", key):
        return None
    places: list[int] = np.unique(pairs.view(np.uint64) >> UNIT_BITS).tolist()
    return places


def _pairs_key(order: DocumentOrder, steps: Steps, near: NearConfig, pairs: Pairs) -> str:
    """Return the key of `verified_pairs` for candidate pairs."""
    texts = _text_hashes(order, steps, np.unique(pairs.view(np.uint64)))
    return inputs_key([near.threshold, near.shingle], pairs, texts)


def _text_hashes(order: DocumentOrder, steps: Steps, numbers: U64) -> npt.NDArray[Any]:
    """Return the hashes of the texts of documents, whose numbers ascend."""
    places, first = np.unique(numbers >> UNIT_BITS, return_index=True)
    parts = [np.empty(0, "V16")]
    for place, some in zip(places.tolist(), np.split(numbers, first[1:]), strict=False):
        hashes = steps.array(order.units[place].step, "texts", "V16")
        parts.append(hashes[some & IN_UNIT])
    return np.concatenate(parts)


def shingle_sets(
    order: DocumentOrder, steps: Steps, near: NearConfig, place: int, numbers: U64
) -> None:
    """Read a unit again and write the shingle sets of its documents in candidate pairs."""
    name, texts = f"shingles-{place:05d}", _text_hashes(order, steps, numbers)
    key = inputs_key([near.shingle], numbers, texts)
    if steps.done(name, key):
        return
    wanted = (numbers & IN_UNIT).astype(np.int64)
    ends: list[Content] = []

    def pieces() -> Iterator[Content]:
        """Yield the sets, and fill `ends`."""
        lengths: list[int] = []
        for some in _texts(order, steps, place, wanted) if len(wanted) else ():
            cut = shingles(some, near.shingle)
            edges = np.searchsorted(cut.document, np.arange(len(some) + 1))
            for first, last in pairwise(edges.tolist()):
                found = np.sort(cut.hashes[first:last])  # np.unique takes five times as long
                found = found[np.append(True, found[1:] != found[:-1])]
                lengths.append(len(found))
                yield found
        ends.append(np.cumsum(lengths, dtype=np.int64))

    steps.write(name, key, {"hashes": pieces(), "in-pairs": [wanted], "ends": ends})


def _texts(order: DocumentOrder, steps: Steps, place: int, wanted: Int) -> Iterator[list[bytes]]:
    """Yield the texts of the wanted documents; raise DamagedError if the corpus has changed."""
    placed = order.units[place]
    sizes = steps.array(placed.step, "sizes", np.uint32)
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


def verified_pairs(
    order: DocumentOrder, steps: Steps, near: NearConfig, place: int, pairs: Pairs
) -> None:
    """Write the pairs of a unit whose Jaccard similarity reaches the threshold, and its value."""

    @lru_cache(maxsize=OPEN_UNITS)
    def sets(unit: int) -> ShingleSets:
        name = f"shingles-{unit:05d}"
        endings = {"in-pairs": np.int64, "ends": np.int64, "hashes": np.uint64}
        return ShingleSets(*(steps.array(name, e, dtype) for e, dtype in endings.items()))

    verified = [np.empty(0, SCORED)]
    batch: list[tuple[int, int, U64, U64]] = []
    size = 0

    def compare() -> None:
        found = np.empty(len(batch), SCORED)
        found["later"], found["earlier"] = [pair[0] for pair in batch], [pair[1] for pair in batch]
        found["score"] = jaccard([(one, two) for _, _, one, two in batch])
        verified.append(found[found["score"] >= near.threshold])
        batch.clear()

    for a, b in pairs.tolist():
        one, two = (sets(n >> 32).of(n & (2**32 - 1)) for n in (a, b))
        # Sets of such different sizes cannot be similar enough.
        if min(len(one), len(two)) / max(len(one), len(two)) < near.threshold:
            continue
        batch.append((a, b, one, two))
        size += len(one) + len(two)
        if size >= SHINGLES_AT_ONCE:
            compare()
            size = 0
    if batch:
        compare()
    key = _pairs_key(order, steps, near, pairs)
    steps.write(f"verified-{place:05d}", key, {"pairs": [np.concatenate(verified)]})


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
