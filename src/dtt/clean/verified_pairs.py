"""Pass 3: the exact Jaccard similarity of candidate pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dtt.base.errors import DamagedError
from dtt.clean.document_order import IN_UNIT, DocumentOrder
from dtt.clean.partitions import PAIR, Pairs
from dtt.clean.shingles import U64, Int, shingles
from dtt.clean.sorted_files import OPEN_FILES, SortedFiles
from dtt.clean.steps import Steps
from dtt.config.clean import NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_batches
from dtt.mesh.comm import Comm

SHINGLES_AT_ONCE = 2**20
"""Number of shingles of the pairs that are compared at once."""
SCORED = np.dtype([*PAIR.descr, ("score", "<f8")])
"""Two documents and their Jaccard similarity."""


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
        self._opened: dict[int, tuple[U64, U64, U64]] = {}

    def write(self, near: NearConfig, documents: SortedFiles, comm: Comm) -> None:
        """Read the units with `documents` again and write their sets; collective."""
        places = range(len(self._order.units))
        blocks = [places[i : i + self._size] for i in range(0, len(places), self._size)]
        for block in range(comm.rank, len(blocks), comm.size):
            if not self._steps.done(_block_name(block)):
                sets = self._sets(near, blocks[block], documents)
                self._steps.write(_block_name(block), {"sets": sets})
        comm.barrier()

    def _sets(self, near: NearConfig, places: range, documents: SortedFiles) -> Iterator[U64]:
        """Yield the content of the file of a block."""
        numbers, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for place in places:
            wanted = np.unique(documents.between(place << 32, place + 1 << 32)["number"])
            numbers.append(wanted)
            texts = _texts(self._order, self._steps, place, (wanted & IN_UNIT).astype(np.int64))
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

    def of(self, number: int) -> U64:
        """Return the sorted shingle set of a document."""
        block = (number >> 32) // self._size
        if block not in self._opened:
            content = self._steps.array(_block_name(block), "sets", np.uint64)
            count = int(content[-1])
            ends, numbers = content[-1 - 2 * count : -1].reshape(2, count)
            self._opened[block] = content, ends, numbers
        content, ends, numbers = self._opened[block]
        at = int(np.searchsorted(numbers, np.uint64(number)))
        return content[int(ends[at - 1]) if at else 0 : int(ends[at])]


def _block_name(block: int) -> str:
    return f"shingles-{block:05d}"


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


def verified_pairs(sets: ShingleSets, near: NearConfig, pairs: Pairs) -> Pairs:
    """Return the pairs whose Jaccard similarity reaches the threshold, and its value."""
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
        one, two = sets.of(a), sets.of(b)
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
