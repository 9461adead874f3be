"""Repeated n-grams of words in a document, as Gopher's rules count them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from dtt.clean.word_windows import ngram_hashes


class WordSequence:
    """The words of a document, numbered by their first occurrence."""

    def __init__(self, words: Sequence[str]) -> None:
        """Give each word a number."""
        found: defaultdict[str, int] = defaultdict(count().__next__)
        # In C code: a Python loop takes three times as long.
        self._numbers = np.fromiter(map(found.__getitem__, words), np.uint64, len(words))
        self._distinct = list(found)
        self.distinct = found.keys()
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        self._ends = np.concatenate(([0], np.cumsum(lengths)))
        """Characters in front of each word, and of all words."""

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def chars(self) -> int:
        """Number of characters, without white space."""
        return int(self._ends[-1])

    def count(self, holds: Callable[[str], object]) -> int:
        """Return the number of words for which `holds` is true."""
        true = np.fromiter(map(bool, map(holds, self._distinct)), bool, len(self._distinct))
        return int(true[self._numbers].sum())

    def top_ngram_chars(self, n: int) -> int:
        """Return the characters, with spaces, in all occurrences of the most frequent n-gram.

        Of several, the one that occurs first counts. 0 for less than n words.
        """
        hashes = ngram_hashes(self._numbers, n)
        if not len(hashes):
            return 0
        ordered = np.sort(hashes)
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(starts, append=len(ordered))
        most = int(counts.max())
        first = 0 if most == 1 else int(np.isin(hashes, ordered[starts[counts == most]]).argmax())
        return most * (self._chars(n)[first] + n - 1)  # type: ignore[no-any-return]

    def repeated_chars_bound(self, n: int) -> int:
        """Return the characters of all words in n-grams that occurred before.

        No `repeated_chars` of as many or more words is larger.
        """
        hashes = ngram_hashes(self._numbers, n)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        repeated = order[1:][ordered[1:] == ordered[:-1]]
        if not len(repeated):
            return 0
        inside = np.zeros(len(self), bool)
        for offset in range(n):
            inside[repeated + offset] = True
        return int(np.diff(self._ends)[inside].sum())

    def repeated_chars(self, n: int) -> int:
        """Return the characters in n-grams that occurred before, none of them counted twice.

        After a repeated n-gram, the search continues behind it. This is a loop in Python over the
        words; `repeated_chars_bound` spares most documents from it.
        """
        hashes = ngram_hashes(self._numbers, n).tolist()
        chars = self._chars(n)
        seen: set[int] = set()
        total = start = 0
        while start < len(hashes):
            if hashes[start] in seen:
                total += int(chars[start])
                start += n
            else:
                seen.add(hashes[start])
                start += 1
        return total

    def _chars(self, n: int) -> npt.NDArray[np.int64]:
        """Return the characters of each n-gram, without white space."""
        return self._ends[n:] - self._ends[:-n]
