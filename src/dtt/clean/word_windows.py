"""Hashes of the n-grams of a sequence of words, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no number of a word is lost; 2^64 divided by the golden ratio."""

Hashes = npt.NDArray[np.uint64]


def ngram_hashes(numbers: Hashes, n: int) -> Hashes:
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
