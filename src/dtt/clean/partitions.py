"""Pass 2: exact groups and candidate pairs, by partitions of the keys of all units.

A partition is a range of key values. As keys are hashes, partitions are about equally large; their
number follows from the number of keys, never from the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.clean.document_order import DocumentOrder, DocumentSet
from dtt.clean.shingles import U64
from dtt.clean.sorted_files import Rows, SortedFile, SortedFiles, merge
from dtt.clean.steps import Steps
from dtt.clean.unit_pass import ENTRY, EXACT, Files
from dtt.mesh.comm import Comm

PARTITION_ENTRIES = 2**20
"""Average number of keys of a partition. One takes 60 to 500 bytes for each, the more the more
documents share keys: up to 0.5 GB. Equal keys are in one partition, however many there are: ten
million copies of a document take 1 GB."""
FIRST_FEW = 8
"""Number of earlier documents of a group with the same band key with which each one is compared, so
that a group of n documents makes at most 8 n pairs, not n². Exact copies do not count."""
PAIR = np.dtype([("later", "<u8"), ("earlier", "<u8")])
"""Two documents."""
DOCUMENT = np.dtype([("number", "<u8")])

Pairs = npt.NDArray[Any]


def exact_copies(order: DocumentOrder, steps: Steps, comm: Comm) -> list[SortedFile]:
    """Write the documents whose text equals an earlier one's, with the first one; collective.

    Returns the files of these pairs.
    """

    def pairs(rows: Rows) -> Files:
        high, low, number = (np.ascontiguousarray(rows[name]) for name in ("high", "low", "number"))
        sorting = np.lexsort((number, low, high))
        high, low, number = high[sorting], low[sorting], number[sorting]
        starts = np.ones(len(number), np.bool_)
        starts[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        first = number[np.maximum.accumulate(np.where(starts, np.arange(len(number)), 0))]
        later = ~starts & order.is_own(number)
        return {"pairs": [different(_pairs(number[later], first[later]))]}

    units = [SortedFile(unit.step, "exact") for unit in order.units]
    keys = SortedFiles(steps, merge(steps, "merged-exact", units, EXACT, comm), EXACT)
    names = _partitions(steps, "exact", keys, sum(order.counts), pairs, comm)
    files = [SortedFile(name, "pairs") for name in names]
    return merge(steps, "merged-copies", files, PAIR, comm)


def candidate_pairs(
    order: DocumentOrder, steps: Steps, copies: DocumentSet, comm: Comm
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
        starts = np.ones(len(keys), np.bool_)
        starts[1:] = keys[1:] != keys[:-1]
        start = np.maximum.accumulate(np.where(starts, np.arange(len(keys)), 0))
        position = np.arange(len(keys)) - start
        own = order.is_own(number)
        found = [np.empty(0, PAIR)]
        for place in range(FIRST_FEW):
            chosen = np.flatnonzero((position > place) & own)
            found.append(_pairs(number[chosen], number[start[chosen] + place]))
        several = different(np.concatenate(found))
        return {"pairs": [several], "documents": [np.unique(several.view(np.uint64))]}

    runs = [facts["runs"] for facts in order.facts]
    units = [SortedFile(u.step, "keys", some) for u, some in zip(order.units, runs, strict=True)]
    keys = SortedFiles(steps, merge(steps, "merged-keys", units, ENTRY, comm), ENTRY)
    names = _partitions(steps, "pairs", keys, sum(map(sum, runs)), pairs, comm)
    files, documents = ([SortedFile(name, e) for name in names] for e in ("pairs", "documents"))
    return (
        merge(steps, "merged-pairs", files, PAIR, comm),
        merge(steps, "merged-documents", documents, DOCUMENT, comm),
    )


def _partitions(
    steps: Steps,
    kind: str,
    keys: SortedFiles,
    entries: int,
    pairs: Callable[[Rows], Files],
    comm: Comm,
) -> list[str]:
    """Write the files that `pairs` makes of each partition; return the names of the steps.

    Collective.
    """
    count = max(1, -(-entries // PARTITION_ENTRIES))
    lows = [-(-(i << 32) // count) << 32 for i in range(count + 1)]
    names = [f"{kind}-{partition:05d}" for partition in range(count)]
    for partition in range(comm.rank, count, comm.size):
        if not steps.done(names[partition]):
            rows = keys.between(lows[partition], lows[partition + 1])
            steps.write(names[partition], pairs(rows))
    comm.barrier()
    return names


def _pairs(later: U64, earlier: U64) -> Pairs:
    pairs = np.empty(len(later), PAIR)
    pairs["later"], pairs["earlier"] = later, earlier
    return pairs


def different(pairs: Pairs) -> Pairs:
    """Return the different pairs, sorted."""
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["later"]))]
    return pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs


def pairs_of_unit(pairs: SortedFiles, place: int) -> Pairs:
    """Return the different pairs whose later document is in the unit at a place, sorted."""
    return different(pairs.between(place << 32, place + 1 << 32))
