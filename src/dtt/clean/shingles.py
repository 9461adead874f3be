"""Shingles of batches of documents, as 64-bit hashes, cut on bytes by numpy, and their sketches.

A word is a run of ASCII letters and digits, and of characters beyond ASCII that are not listed in
SEPARATORS. ASCII letters count without their case; everything else separates words. Characters of
scripts without spaces (ALONE) are words of their own, so that such text has shingles of characters,
and mixed text needs no decision. A shingle is a run of some number of words in one document.

Why on bytes: a loop over words in Python takes five times as long as everything here.

A MinHash sketch has band keys: documents that are likely to be near duplicates share a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

U64 = npt.NDArray[np.uint64]
Int = npt.NDArray[np.int64]

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no number of a word is lost; 2^64 divided by the golden ratio."""
SPACE = 0x20
FOLDED = bytes(
    byte if byte >= 0x80 else ord(chr(byte).lower()) if chr(byte).isalnum() else SPACE
    for byte in range(256)
)
"""Lower-case ASCII, with a space for everything that is neither a letter nor a digit."""
SEPARATORS = (
    (0x80, 0xC0), (0x2000, 0x2070), (0x3000, 0x3040), (0xFF00, 0xFF10), (0xFF1A, 0xFF21),
)  # fmt: skip
"""Code points beyond ASCII that separate words: Latin-1 signs, general punctuation, CJK punctuation
and full-width forms of ASCII signs."""
ALONE = (
    (0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3040, 0xA000), (0xF900, 0xFB00),
    (0x20000, 0x32000),
)  # fmt: skip
"""Code points of scripts without spaces: Thai, Lao, Burmese, Khmer, kana and Chinese characters."""
_BOUNDS = np.array(sorted(edge for pair in (*SEPARATORS, *ALONE) for edge in pair))
_KINDS = np.zeros(len(_BOUNDS) + 1, np.uint8)
_KINDS[np.searchsorted(_BOUNDS, [first for first, _ in SEPARATORS], "right")] = 1
_KINDS[np.searchsorted(_BOUNDS, [first for first, _ in ALONE], "right")] = 2
LONGEST = 64
"""Longest words, in bytes, that are hashed by numpy; others are hashed one by one."""
_KEPT = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
"""Mask of the first n bytes of a little-endian number."""

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


class Shingles(NamedTuple):
    """The shingles of a batch of documents, in order, with repetitions."""

    hashes: U64
    document: Int
    """Number of the document in the batch, for each shingle; ascending."""


def mixed(values: U64) -> U64:
    """Return values whose bits all depend on all bits of `values` (MurmurHash3's finalizer)."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


def shingles(documents: Sequence[bytes], words: int) -> Shingles:
    """Return the shingles of `words` words of each document; none where there are fewer words."""
    # A space before the first word and eight bytes after the last: both ends need no special case.
    text = b" %b\n%b" % (b"\n".join(documents), b" " * 8)
    starts, ends, content = _cut(text.translate(FOLDED))
    hashes = _word_hashes(content, starts, ends - starts)
    offsets = np.cumsum([1, *(len(document) + 1 for document in documents)])
    counts = np.diff(np.searchsorted(starts, offsets))
    document = np.repeat(np.arange(len(documents)), counts)
    if len(hashes) < words:
        return Shingles(hashes[:0], document[:0])
    runs = ngram_hashes(hashes, words)
    last = len(runs)
    inside = document[:last] == document[words - 1 :]
    return Shingles(mixed(runs[inside]), document[:last][inside])


def _cut(text: bytes) -> tuple[Int, Int, npt.NDArray[np.uint8]]:
    """Return the starts and ends of all words of folded text, and its bytes.

    The bytes of separators beyond ASCII have become spaces.
    """
    content = np.frombuffer(text, np.uint8)
    alone = length = np.empty(0, np.int64)
    if not text.isascii():
        content = content.copy()
        alone, length = _beyond_ascii(content)
    inside = content != SPACE
    if not len(alone):  # in half the time
        edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
        return edges[::2], edges[1::2], content
    start, end = inside.copy(), inside.copy()
    start[1:] &= ~inside[:-1]
    end[:-1] &= ~inside[1:]
    # Also where one begins directly after another word, or ends directly before it.
    start[alone] = end[alone + length - 1] = True
    start[alone + length] = inside[alone + length]
    end[alone - 1] = inside[alone - 1]
    return np.flatnonzero(start), np.flatnonzero(end) + 1, content


def _beyond_ascii(content: npt.NDArray[np.uint8]) -> tuple[Int, Int]:
    """Overwrite separators in UTF-8 by spaces; return positions and lengths of ALONE characters."""
    first = np.flatnonzero(content >= 0xC2)
    lead = content[first].astype(np.int64)
    length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
    point = lead & (0x7F >> length)
    for place in range(1, 4):
        more = point << 6 | content[first + place] & 0x3F
        point = np.where(place < length, more, point)
    kind = _KINDS[np.searchsorted(_BOUNDS, point, "right")]
    for place in range(4):
        content[first[(kind == 1) & (place < length)] + place] = SPACE
    alone = kind == 2
    return first[alone], length[alone]


def _word_hashes(content: npt.NDArray[np.uint8], starts: Int, lengths: Int) -> U64:
    """Return a hash of each word, from eight of its bytes at a time."""
    # Eight bytes from every position on, without a copy.
    eight = np.ndarray((len(content) - 7,), "<u8", content, strides=(1,))
    hashes = (eight[starts] & _KEPT[np.minimum(lengths, 8)]) * MULTIPLIER
    hashes ^= hashes >> np.uint64(32)
    longer = np.flatnonzero(lengths > 8)
    for place in range(8, LONGEST, 8):
        rest = lengths[longer] - place
        longer, rest = longer[rest > 0], rest[rest > 0]
        part = eight[starts[longer] + place] & _KEPT[np.minimum(rest, 8)]
        more = (hashes[longer] + part) * MULTIPLIER
        hashes[longer] = more ^ (more >> np.uint64(29))
    for word in np.flatnonzero(lengths > LONGEST).tolist():
        part_of = content[starts[word] : starts[word] + lengths[word]]
        hashes[word] = xxhash.xxh3_64_intdigest(part_of.tobytes())
    return hashes


def ngram_hashes(numbers: U64, n: int) -> U64:
    """Return the hash of each n-gram of words, given by their numbers: shape (len - n + 1,).

    It is a polynomial of the numbers modulo 2^64. Two given n-grams have equal hashes with a
    probability of about 2^-64, which depends on nothing but the numbers.
    """
    count = max(len(numbers) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for start in range(n):
        hashes *= MULTIPLIER
        hashes += numbers[start : start + count]
    return hashes


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
