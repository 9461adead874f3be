"""gigatoken as an engine: about a hundred times as fast as `tokenizers`, where the ids are equal.

What it does differently is left to `tokenizers`, document by document: special-token strings, which
it always takes for the tokens, and characters that only a newer version of Unicode knows, which one
of the two may take for letters. So are very long documents, for it lets no other thread run
meanwhile.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CACHED_CHARACTERS = 2 * 2**30
"""Its cache of words never forgets: after so much text, begin with an empty one."""
LONGEST = 2**21
"""Characters at once: a few seconds at worst, so that a rank can still give its signs of life."""
KNOWN_PLANES = 0x20000
"""Rare ideographs and private use lie beyond; whether those are known is not looked up."""

Ids = npt.NDArray[np.uint32]
Exact = Callable[[list[str]], list[Ids]]


class Unfit(Exception):
    """Why gigatoken cannot be used."""


class Gigatoken:
    """Encodes documents one by one, on the calling thread, or has `exact` do it."""

    def __init__(
        self, content: bytes, normalizer: Any, special: Iterable[str], exact: Exact
    ) -> None:
        """`content` of a tokenizer.json, whose `special` tokens are to be encoded as text.

        Raises Unfit where it is not installed, or does not know such a tokenizer.
        """
        self._content = content
        self._special = tuple(special)
        self._beginnings = {token[:2] for token in self._special}
        self._exact = exact
        self._composes = _composes(normalizer)
        self._encode = self._open()
        self._room = CACHED_CHARACTERS

    def __call__(self, texts: list[str]) -> list[Ids]:
        """Ids of each document."""
        self._room -= sum(map(len, texts))
        if self._room < 0:
            self._encode, self._room = self._open(), CACHED_CHARACTERS
        encode, takes = self._encode, self._takes
        documents = [encode(text) if takes(text) else None for text in texts]
        others = [i for i, ids in enumerate(documents) if ids is None]
        for i, ids in zip(others, self._exact([texts[i] for i in others]), strict=True):
            documents[i] = ids
        return documents  # type: ignore[return-value]  # none is None any more

    def difference(self, texts: list[str]) -> str | None:
        """Where the ids are not those of `exact`, if anywhere."""
        for text, ours, exact in zip(texts, self(texts), self._exact(texts), strict=True):
            if not np.array_equal(ours, exact):
                return f"gigatoken gives other ids for {text[:60]!r}"
        return None

    def _open(self) -> Callable[[str], Ids]:
        try:
            from gigatoken import Tokenizer
        except ImportError as error:
            raise Unfit(f"gigatoken is not installed ({error})") from None
        try:
            encode: Callable[[str], Ids] = Tokenizer.from_json(self._content).backend.encode
        except Exception as error:  # noqa: BLE001 - it raises whatever its Rust code meets
            raise Unfit(f"gigatoken does not know this tokenizer: {error}") from None
        return encode

    def _takes(self, text: str) -> bool:
        """Whether the engines cannot differ, and the text is not too long."""
        if len(text) > LONGEST:
            return False
        # To look for one character is quick, for two less so, for every token slow.
        for beginning in self._beginnings:
            if beginning[0] in text and beginning in text:
                if any(token in text for token in self._special):
                    return False
                break
        if text.isascii():
            return True
        return _is_known(text) and (not self._composes or unicodedata.is_normalized("NFC", text))


def _composes(normalizer: Any) -> bool:
    """Whether it is NFC; Unfit unless it is that, none, or SentencePiece's way with spaces."""
    match normalizer:
        case None:
            return False
        case {"type": "NFC"}:
            return True
        case {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend"}, {"type": "Replace", "pattern": {"String": " "}}],
        }:
            return False
    raise Unfit(f"it is used with no normalizer or NFC, not {json.dumps(normalizer)[:80]}")


def _is_known(text: str) -> bool:
    """Whether Python's version of Unicode knows all characters.

    Their NFC form never changes (https://www.unicode.org/policies/stability_policy.html), and their
    classes hardly ever: the tests compare them. The engines know Unicode 16 and 17 at the time of
    writing, Python 3.11 knows 14 and Python 3.14 knows 16.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return bool(_known().take(codes, mode="clip").all())


@cache
def _known() -> npt.NDArray[np.bool_]:
    """[KNOWN_PLANES + 1] whether Python's version of Unicode knows the character; the last: no."""
    categories = (unicodedata.category(chr(code)) for code in range(KNOWN_PLANES))
    known = np.fromiter((category != "Cn" for category in categories), np.bool_, KNOWN_PLANES)
    return np.append(known, False)


def hard_texts(added_tokens: Iterable[str]) -> list[str]:
    """Short texts on which tokenizers are known to go apart, some with the added tokens in them."""
    return [
        "", " ", "  ", "\n", "\r\n", "\t", "\x00", "\u00a0", "\u2028", "\ufeff", "\u200b",
        "a  b   c    d     e" + " " * 30 + "f", " lead and trail ",
        "\n\n\n text\n \n  \n\tx \r\n\r y", "I'll don't WE'RE 'tis ’s 's'S'd'D",
        "0 12 345 6789 01234567890 3.14 1,000,000 ½ ² ٣٤ 一二 Ⅷ",
        "naïve café Å é ñ ǆ ﬁ ß İ ı Σς", "日本語のテキスト。汉字漢字 한국어 ｶﾞ",
        "हिन्दी ক্ত ไทย ລາວ မြန်မာ עברית العَرَبِيَّة",
        "🤗 👍🏽 🇩🇪 ❤\ufe0f \U0001f469\u200d\U0001f467 𝔘𝔫𝔦 𐍈 𠀋",
        "e\u0301\u0327 a\u0308\u0323 \u0301 \u212b \u1112\u1161\u11ab \u0915\u093c",
        "\ud7ff\ue000\ufffd\uffff\U00010000\U0010ffff", "x" * 300, "ab" * 200,
        "!?.,;:-_=+*/\\|@#$%^&~`'\"()[]{}<>" * 3, "_a__b___c ....... ------ ====",
        "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n",
        "http://a.b/c?d=e&f=%20 a@b.c <p>x</p>",
        *(f"a{token}b {token} c\n{token}" for token in added_tokens),
    ]  # fmt: skip
