"""MinHash sketches of documents and their band keys: likely near duplicates share a key."""

from __future__ import annotations

import math

import numpy as np

from dtt.clean.shingles import U64, Shingles, mixed
from dtt.clean.word_windows import MULTIPLIER

MISSED = 0.004
"""Largest probability that a pair exactly at the threshold shares no band. False candidates cost
time only, because every pair is verified."""
VALUES = 128
"""Largest number of values of a sketch, unless the threshold needs more."""
ROUNDS = 3
"""Rounds before the bins that are still empty are filled one by one. A round takes about 7 ns a
shingle, and filling 114 bins 30 to 140: documents of over 300 shingles seldom need that, and those
of ten would need fifty rounds."""
EMPTY = np.uint64(2**64 - 1)
_VALUE_BITS = 48


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return the numbers of bands and of rows in each, for a threshold of the Jaccard similarity.

    A pair of similarity J shares a band with probability 1 - (1 - J^rows)^bands (Leskovec,
    Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). More rows make fewer false
    candidates: the most that fit into VALUES values are taken.
    """

    def bands(rows: int) -> int:
        missed = 1 - threshold**rows
        return 1 if missed <= MISSED else math.ceil(math.log(MISSED) / math.log(missed))

    rows = 1
    while rows < 32 and bands(rows + 1) * (rows + 1) <= VALUES:
        rows += 1
    return bands(rows), rows


def sketches(shingles: Shingles, documents: int, values: int) -> U64:
    """Return a sketch of each document, of shape (documents, values).

    Two sketches agree in a value with the probability of the Jaccard similarity of the shingle sets
    (Dahlgaard, Knudsen and Thorup 2017, Fast Similarity Sketching): each shingle falls into one bin
    per round, and a bin keeps its smallest value of the first round that reaches it. After ROUNDS
    rounds, each bin that is still empty gets the smallest of a hash of its own of all shingles.
    Documents of many shingles need a single round, which is why this is faster than a hash per
    value and shingle. Documents without shingles keep the largest number in all bins.
    """
    hashes, document = shingles
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    waiting, lengths = document[starts], np.diff(starts, append=len(hashes))
    table = np.full((documents, values), EMPTY)
    factors = mixed(np.arange(1, ROUNDS + values + 1, dtype=np.uint64)) | np.uint64(1)
    for turn in range(ROUNDS):
        value = hashes * factors[turn]
        value ^= value >> np.uint64(32)
        bins = (value >> np.uint64(8) & np.uint64(2**32 - 1)) * np.uint64(values)
        place = (bins >> np.uint64(32)).view(np.int64) + np.repeat(waiting * values, lengths)
        value >>= np.uint64(64 - _VALUE_BITS)
        value |= np.uint64(turn << _VALUE_BITS)
        np.minimum.at(table.reshape(-1), place, value)
        room = (table[waiting] == EMPTY).any(axis=1)
        hashes = hashes[np.repeat(room, lengths)]
        waiting, lengths = waiting[room], lengths[room]
    if len(waiting):
        starts = np.cumsum(lengths) - lengths
        short, least = hashes.astype(np.uint32), np.empty((values, len(waiting)), np.uint32)
        for place, factor in enumerate(factors[ROUNDS:].astype(np.uint32)):
            np.minimum.reduceat(short * factor, starts, out=least[place])
        table[waiting] = np.minimum(table[waiting], least.T | np.uint64(ROUNDS << _VALUE_BITS))
    return table


def band_keys(sketches: U64, bands: int, rows: int) -> U64:
    """Return a key of each band of each sketch, of shape (documents, bands)."""
    parts = sketches.reshape(len(sketches), bands, rows)
    keys = np.broadcast_to(mixed(np.arange(bands, dtype=np.uint64)), parts.shape[:2]).copy()
    for row in range(rows):
        keys *= MULTIPLIER
        keys += parts[:, :, row]
        keys ^= keys >> np.uint64(32)
    return mixed(keys)
