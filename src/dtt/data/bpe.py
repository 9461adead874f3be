"""Byte-level BPE, learnt from a table of words and their counts.

The two symbols that stand beside each other most often become one symbol, again and again (Sennrich
et al. 2016, arXiv 1508.07909). Of pairs that are equally frequent the one with the smaller left id
comes first, then the smaller right id. The result is that of Hugging Face's `BpeTrainer`, which
counts in 32 bits and starts from text; here counts have 64 bits, and tables of many ranks add up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from dtt.runtime.log import Advance

MIN_COUNT = 2
"""What stands anywhere only once is not merged."""
BORDER = -1
"""Between words."""
INNER = -2
"""Where a symbol began that is now part of another."""

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Learnt:
    """What a BPE model consists of."""

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]


def learn(
    words: Mapping[str, int],
    vocab_size: int,
    special_tokens: Iterable[str],
    advance: Advance = lambda amount: None,
) -> Learnt:
    """A vocabulary of `vocab_size` entries, or of fewer when no pair repeats any more.

    `words` and their counts are in the alphabet of `ByteLevel`, a character per byte. The special
    tokens come first, then the 256 bytes, then what is merged. `advance` is told of each merge.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys([*special_tokens, *alphabet]))
    ids = {token: i for i, token in enumerate(tokens)}
    text = _Text(words, ids)
    merges = []
    while len(tokens) < vocab_size and (pair := text.most_frequent()) is not None:
        left, right = (tokens[i] for i in pair)
        # A string is merged in one way only: within a symbol nothing from outside interferes. So it
        # can have an id already only as a special token; `BpeTrainer` takes that one, too.
        merged = ids.setdefault(left + right, len(tokens))
        if merged == len(tokens):
            tokens.append(left + right)
        merges.append((left, right))
        text.merge(pair, merged)
        advance(1)
    return Learnt(ids, merges)


class _Text:
    """The words in one row, cut into symbols, and a queue of the pairs of neighbours.

    A symbol of n characters takes n places of the row; its id stands in the first and the last, so
    that its neighbours find it. A pair is noted once, when the newer of its symbols is made. After
    that its count can only fall. So the queue holds upper bounds; when a pair comes up, it is
    counted again, at the places where it was.
    """

    def __init__(self, words: Mapping[str, int], ids: Mapping[str, int]) -> None:
        characters = np.frombuffer("\n".join(["", *words, ""]).encode("utf-32-le"), np.uint32)
        id_of = np.full(0x200, BORDER, np.int32)  # the alphabet ends below
        for character in pre_tokenizers.ByteLevel.alphabet():
            id_of[ord(character)] = ids[character]
        self._row: Ids = id_of[characters]
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        counts = np.fromiter(words.values(), np.int64, len(words))
        self._weight: Numbers = np.concatenate([[0], np.repeat(counts, lengths + 1)])
        """Count of the word at each place."""
        self._length: Numbers = np.ones(2 * len(ids), np.int64)
        """Characters of each symbol."""
        self._places: dict[int, Numbers] = {}
        """Where each pair was, in ascending order, by its key: left · 2³² + right."""
        self._queue: list[tuple[int, int]] = []
        """Minus an upper bound of the count, and the key."""
        places = np.flatnonzero((self._row[:-1] != BORDER) & (self._row[1:] != BORDER))
        self._note(self._row[places], self._row[places + 1], places)

    def most_frequent(self) -> Pair | None:
        """The pair to merge next; None if none repeats."""
        while self._queue:
            bound, key = self._queue[0]
            pair = divmod(key, 2**32)
            places = self._still(pair, self._places[key])
            count = int(self._weight[places].sum())
            if count == -bound:
                self._places[key] = places
                return pair
            if count >= MIN_COUNT:
                self._places[key] = places
                heapq.heapreplace(self._queue, (-count, key))
            else:
                del self._places[key]
                heapq.heappop(self._queue)
        return None

    def merge(self, pair: Pair, merged: int) -> None:
        """Make one symbol of `pair` everywhere; it is the pair that `most_frequent` returned."""
        _, key = heapq.heappop(self._queue)
        starts = self._places.pop(key)
        left, right = pair
        if merged >= len(self._length):
            self._length = np.resize(self._length, 2 * merged)
        middle = self._length[left]
        self._length[merged] = length = middle + self._length[right]
        if left == right:
            starts = _every_second(starts, middle)
        ends = starts + length
        self._row[starts + middle] = INNER
        self._row[starts] = merged
        self._row[ends - 1] = merged
        before, after = self._row[starts - 1], self._row[ends]
        # Where one follows another, the pair is noted as what stands after the first.
        first = before != BORDER
        first[1:] &= starts[1:] != ends[:-1]
        last = after != BORDER
        before, after = before[first], after[last]
        new = np.full(len(starts), merged, np.int32)
        self._note(
            np.concatenate([before, new[last]]),
            np.concatenate([new[first], after]),
            np.concatenate([starts[first] - self._length[before], starts[last]]),
        )

    def _still(self, pair: Pair, places: Numbers) -> Numbers:
        """Those of `places` where the pair stands now."""
        left, right = pair
        places = places[self._row[places] == left]
        still: Numbers = places[self._row[places + self._length[left]] == right]
        return still

    def _note(self, left: Ids, right: Ids, places: Numbers) -> None:
        """Put pairs that have not been there before into the queue."""
        if not len(places):
            return
        keys = left.astype(np.int64) << 32 | right
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        stops = np.append(starts[1:], len(keys))
        counts = np.add.reduceat(self._weight[places], starts)
        often = counts >= MIN_COUNT
        found = (keys[starts], counts, starts, stops)
        for key, count, start, stop in zip(*(x[often].tolist() for x in found), strict=True):
            self._places[key] = places[start:stop]
            heapq.heappush(self._queue, (-count, key))


def _every_second(starts: Numbers, length: int) -> Numbers:
    """Of the pairs of a symbol with itself, those that do not overlap, from left to right."""
    runs = np.flatnonzero(np.diff(starts, prepend=-length) != length)
    in_run = np.arange(len(starts)) - np.repeat(runs, np.diff(runs, append=len(starts)))
    apart: Numbers = starts[in_run % 2 == 0]
    return apart
