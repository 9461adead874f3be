"""gigatoken as an engine: about a hundred times as fast as `tokenizers`, where the ids are equal.

It encodes documents together, in a row, with the string of the end-of-document token after each.
What it does differently is left to `tokenizers`, document by document: special-token strings, which
it always takes for the tokens, and characters that only a newer version of Unicode knows, which one
of the two may take for letters. Where it lets no other thread run meanwhile, so are very long ones.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CACHED_BYTES = 2 * 2**30
"""Its cache of words never forgets: after so much text, begin with an empty one."""
LONGEST = 2**22
"""Bytes at once where it keeps Python's lock: a few seconds at worst, so that a rank can still give
its signs of life."""

Ids = npt.NDArray[np.uint32]


class Row(NamedTuple):
    """Encoded documents in a row, each ended by the end-of-document token."""

    ids: Ids
    """[sum(lengths)]"""
    lengths: npt.NDArray[np.int32]
    """[documents]: the tokens of each, its end included."""

    def documents(self) -> Iterator[Ids]:
        """The ids of one after the other."""
        start = 0
        for length in self.lengths.tolist():
            yield self.ids[start : start + length]
            start += length


class Unfit(Exception):
    """Why gigatoken cannot be used."""


class Gigatoken:
    """Encodes documents on the calling thread, or has `exact` do it."""

    def __init__(
        self,
        content: bytes,
        normalizer: Any,
        special: Mapping[str, int],
        end: str,
        exact: Callable[[list[bytes]], Row],
    ) -> None:
        """`content` of a tokenizer.json, whose `special` tokens are to be encoded as text.

        Documents end with one of them, `end`.

        Raises Unfit where it is not installed, or does not know such a tokenizer.
        """
        self._content = content
        self._separator, self._end = end.encode(), special[end]
        self._lowest, self._highest = min(special.values()), max(special.values())
        self._special = np.zeros(self._highest + 1, np.bool_)
        self._special[[*special.values()]] = True
        self._known = np.zeros(sys.maxunicode + 1, np.bool_)
        self._exact = exact
        self._composes = _composes(normalizer)
        self._longest = sys.maxsize
        self._encode = self._open()
        self._room = CACHED_BYTES

    def __call__(self, documents: list[bytes]) -> Row:
        """Encode documents, all of them UTF-8."""
        if (row := self._together(documents)) is not None:
            return row
        if len(documents) == 1:
            return self._exact(documents)
        middle = len(documents) // 2
        ids, lengths = zip(self(documents[:middle]), self(documents[middle:]), strict=True)
        return Row(np.concatenate(ids), np.concatenate(lengths))

    def difference(self, documents: list[bytes]) -> str | None:
        """Where the ids are not those of `exact`, if anywhere."""
        taken = [one for one in documents if self._together([one])]
        rows = zip(taken, self(taken).documents(), self._exact(taken).documents(), strict=True)
        for one, ours, exact in rows:
            if not np.array_equal(ours, exact):
                return f"gigatoken gives other ids for {one.decode()[:60]!r}"
        return None

    def _open(self) -> Callable[[bytes], Ids]:
        try:
            from gigatoken import BytesSource, Tokenizer
            from gigatoken.gigatoken_rs import SentencePieceTokenizer
        except ImportError as error:
            raise Unfit(f"gigatoken is not installed ({error})") from None
        try:
            tokenizer = Tokenizer.from_json(self._content)
        except Exception as error:  # noqa: BLE001 - it raises whatever its Rust code meets
            raise Unfit(f"gigatoken does not know this tokenizer: {error}") from None

        if isinstance(tokenizer.backend, SentencePieceTokenizer):
            self._longest = LONGEST
            locked: Callable[[bytes], Ids] = tokenizer.backend.encode
            return locked  # the call below would begin with an empty cache each time

        def encode(text: bytes) -> Ids:
            # Unlike `encode` it lets other threads run, and unlike `encode_batch` it does not
            # import awkward, which takes as long as encoding 100 MB.
            rows, _ = tokenizer.encode_batch_padded(BytesSource(text), pad_id=0, parallel=False)
            row: Ids = rows[0]
            return row

        return encode

    def _together(self, documents: list[bytes]) -> Row | None:
        """Encode them in one go; None if the engines might differ.

        A special token that does not end a document stands for text, or for text and an end.
        """
        text = self._separator.join([*documents, b""])
        if len(text) > self._longest or not self._agree_on(documents):
            return None
        self._room -= len(text)
        if self._room < 0:
            self._encode, self._room = self._open(), CACHED_BYTES
        ids = self._encode(text)
        if self._lowest == self._highest:
            places = np.flatnonzero(ids == self._end)
        else:
            places = np.flatnonzero((ids >= self._lowest) & (ids <= self._highest))
            places = places[self._special[ids[places]]]
        if len(places) != len(documents) or (ids[places] != self._end).any():
            return None
        return Row(ids, np.diff(places, prepend=-1).astype(np.int32))

    def _agree_on(self, documents: list[bytes]) -> bool:
        """Whether the engines know all the characters alike, and neither has to compose any."""
        text = b"\n".join(one for one in documents if not one.isascii())
        if not text:
            return True
        content = np.frombuffer(text, np.uint8)
        if not self._knows(content[content >= 0x80].tobytes().decode()):
            return False
        return not self._composes or unicodedata.is_normalized("NFC", text.decode())

    def _knows(self, characters: str) -> bool:
        """Whether Python's version of Unicode knows all of them.

        Their NFC form never changes (https://www.unicode.org/policies/stability_policy.html), and
        their classes hardly ever: the tests compare them. The engines know Unicode 16 and 17 at
        the time of writing, Python 3.11 knows 14 and Python 3.14 knows 16.
        """
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        for code in set(codes[~self._known[codes]].tolist()):
            if unicodedata.category(chr(code)) == "Cn":
                return False
            self._known[code] = True
        return True


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
