"""Byte-level BPE training from a table of words and their counts.

Training repeatedly merges the most frequent pair of adjacent symbols into one symbol (Sennrich et
al. 2016, arXiv 1508.07909). Ties go to the pair with the smaller left id, then to the smaller right
id. The result equals that of Hugging Face's `BpeTrainer`, which counts in 32 bits and starts from
text. The counts here have 64 bits, and the tables of several ranks can be summed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from dtt.base.log import Advance

MIN_COUNT = 2
"""Smallest count of a pair that is merged."""
BORDER = -1
"""Marks a word boundary in the symbol array."""
INNER = -2
"""Marks the start of a symbol that has been merged into the symbol on its left."""

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Learnt:
    """The vocabulary and merges of a trained BPE model."""

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]


def learn(
    words: Mapping[str, int],
    vocab_size: int,
    special_tokens: Iterable[str],
    advance: Advance = lambda amount: None,
) -> Learnt:
    """Learn a vocabulary of `vocab_size` entries, or fewer once no pair occurs twice.

    `words` maps each word to its count; words are in the alphabet of `ByteLevel`, one character
    per byte. Ids are assigned to the special tokens first, then to the 256 bytes, then to the
    merged symbols. `advance(1)` is called after each merge.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys([*special_tokens, *alphabet]))
    ids = {token: i for i, token in enumerate(tokens)}
    text = _Text(words, ids)
    merges = []
    while len(tokens) < vocab_size and (pair := text.most_frequent()) is not None:
        left, right = (tokens[i] for i in pair)
        # Only one sequence of merges produces a given string, because merges inside a symbol do not
        # depend on its neighbours. So the string can already have an id only as a special token;
        # `BpeTrainer` reuses that id too.
        merged = ids.setdefault(left + right, len(tokens))
        if merged == len(tokens):
            tokens.append(left + right)
        merges.append((left, right))
        text.merge(pair, merged)
        advance(1)
    return Learnt(ids, merges)


class _Text:
    """All words in one symbol array, with a priority queue of adjacent pairs.

    A symbol of n characters occupies n elements of the array. Its id is stored in the first and the
    last of them, so that both neighbours can read it. A pair is queued once, when the newer of its
    two symbols is created; after that its count can only decrease. The queue therefore holds upper
    bounds, and a pair at its head is recounted at its recorded positions.
    """

    def __init__(self, words: Mapping[str, int], ids: Mapping[str, int]) -> None:
        characters = np.frombuffer("\n".join(["", *words, ""]).encode("utf-32-le"), np.uint32)
        id_of = np.full(0x200, BORDER, np.int32)  # all code points of the alphabet are below 0x200
        for character in pre_tokenizers.ByteLevel.alphabet():
            id_of[ord(character)] = ids[character]
        self._row: Ids = id_of[characters]
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        counts = np.fromiter(words.values(), np.int64, len(words))
        self._weight: Numbers = np.concatenate([[0], np.repeat(counts, lengths + 1)])
        """Count of the word at each position."""
        self._length: Numbers = np.ones(2 * len(ids), np.int64)
        """Length of each symbol in characters, by id."""
        self._places: dict[int, Numbers] = {}
        """Ascending start positions of each pair, by its key: left · 2³² + right.

        They may be outdated: later merges can have consumed the pair.
        """
        self._queue: list[tuple[int, int]] = []
        """Heap of (negative upper bound of the count, key)."""
        places = np.flatnonzero((self._row[:-1] != BORDER) & (self._row[1:] != BORDER))
        self._note(self._row[places], self._row[places + 1], places)

    def most_frequent(self) -> Pair | None:
        """Return the pair to merge next, or None if no pair occurs twice."""
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
        """Replace every occurrence of `pair` by the symbol `merged`.

        `pair` must be the one that `most_frequent` has just returned.
        """
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
        # Where two merged symbols are adjacent, their pair is recorded only as the successor of the
        # first one.
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
        """Return the elements of `places` at which the pair still starts."""
        left, right = pair
        places = places[self._row[places] == left]
        still: Numbers = places[self._row[places + self._length[left]] == right]
        return still

    def _note(self, left: Ids, right: Ids, places: Numbers) -> None:
        """Queue new pairs (`left`, `right`) that start at `places`."""
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
    """Return the starts of non-overlapping pairs of a symbol of `length` with itself.

    Pairs are taken from left to right: in "aaaa", the first and the third of the three pairs.
    """
    runs = np.flatnonzero(np.diff(starts, prepend=-length) != length)
    in_run = np.arange(len(starts)) - np.repeat(runs, np.diff(runs, append=len(starts)))
    apart: Numbers = starts[in_run % 2 == 0]
    return apart
