"""Normalized words, and hashes of the n-grams of a sequence of words."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import numpy.typing as npt
import regex

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no number of a word is lost; 2^64 divided by the golden ratio."""
# `regex`, whose \w includes vowel signs; `re` would cut each word of Hindi in several.
WORD = regex.compile(r"\w+")
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no spaces."""
ASCII_WORDS: dict[int, str | None] = {
    code: chr(code).lower() if chr(code).isalnum() else " " for code in range(128)
}
ASCII_WORDS[ord("'")] = None  # with an empty string, `translate` is slow

Hashes = npt.NDArray[np.uint64]


def normalized_words(text: str) -> list[str]:
    """Return the words of a text, casefolded and without punctuation.

    Apostrophes vanish (`don't` is `dont`); other punctuation separates words. Each character of a
    script without spaces is a word.
    """
    if text.isascii():  # three times as fast
        return text.translate(ASCII_WORDS).split()
    text = unicodedata.normalize("NFC", text.casefold())
    if SPACELESS.search(text):
        text = SPACELESS.sub(r" \g<0> ", text)
    return WORD.findall(text.replace("'", "").replace("’", "").replace("_", " "))  # type: ignore[no-any-return]


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
