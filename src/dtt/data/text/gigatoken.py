"""The gigatoken engine: about 100 times as fast as `tokenizers`, used where the ids are equal.

Documents are concatenated, each followed by the string of the end-of-document token, and encoded in
one call. Documents on which gigatoken could differ are encoded by `tokenizers` instead: those with
special-token strings, which gigatoken always encodes as the special tokens, and those with
characters that Python's version of Unicode does not define, as the two engines may disagree on
whether they are letters. Where gigatoken holds the GIL while it encodes, very long documents are
encoded by `tokenizers` too.
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
"""Bytes of text after which the tokenizer is reopened: its cache of words grows without bound."""
LONGEST = 2**22
"""Maximum bytes per call where gigatoken holds the GIL.

This is a few seconds at worst, so that the thread that watches the launcher can still run in time.
"""

Ids = npt.NDArray[np.uint32]


class EncodedBatch(NamedTuple):
    """Encoded documents in one token buffer, each ended by the end-of-document token."""

    ids: Ids
    """[sum(lengths)]: token ids."""
    lengths: npt.NDArray[np.int32]
    """[documents]: tokens of each document, end-of-document token included."""

    def documents(self) -> Iterator[Ids]:
        """Yield the ids of each document."""
        start = 0
        for length in self.lengths.tolist():
            yield self.ids[start : start + length]
            start += length


class UnsupportedTokenizer(Exception):
    """Raised if gigatoken cannot be used; the message is the reason."""


class Gigatoken:
    """An encoder that uses gigatoken on the calling thread and falls back to `exact`."""

    def __init__(
        self,
        content: bytes,
        normalizer: Any,
        special: Mapping[str, int],
        end: str,
        exact: Callable[[list[bytes]], EncodedBatch],
    ) -> None:
        """Open gigatoken with `content`, a tokenizer.json, and its `normalizer` section.

        `special` maps special tokens to their ids; their strings in documents are encoded as text.
        `end`, one of them, ends documents. `exact` encodes the documents that gigatoken might
        encode differently.

        Raises UnsupportedTokenizer if gigatoken is not installed or does not support the tokenizer.
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

    def __call__(self, documents: list[bytes]) -> EncodedBatch:
        """Encode documents, which must be valid UTF-8.

        If a batch cannot be encoded together, it is halved until only the documents in question
        are left to `exact`.
        """
        if (row := self._together(documents)) is not None:
            return row
        if len(documents) == 1:
            return self._exact(documents)
        middle = len(documents) // 2
        ids, lengths = zip(self(documents[:middle]), self(documents[middle:]), strict=True)
        return EncodedBatch(np.concatenate(ids), np.concatenate(lengths))

    def difference(self, documents: list[bytes]) -> str | None:
        """Return a message about the first document whose ids differ from `exact`, else None."""
        taken = [one for one in documents if self._together([one])]
        rows = zip(taken, self(taken).documents(), self._exact(taken).documents(), strict=True)
        for one, ours, exact in rows:
            if not np.array_equal(ours, exact):
                return f"gigatoken returns different ids for {one.decode()[:60]!r}"
        return None

    def _open(self) -> Callable[[bytes], Ids]:
        try:
            from gigatoken import BytesSource, Tokenizer
            from gigatoken.gigatoken_rs import SentencePieceTokenizer
        except ImportError as error:
            raise UnsupportedTokenizer(f"gigatoken is not installed ({error})") from None
        try:
            tokenizer = Tokenizer.from_json(self._content)
        except Exception as error:  # noqa: BLE001 - any error of its Rust code
            raise UnsupportedTokenizer(
                f"gigatoken does not support this tokenizer: {error}"
            ) from None

        if isinstance(tokenizer.backend, SentencePieceTokenizer):
            self._longest = LONGEST
            locked: Callable[[bytes], Ids] = tokenizer.backend.encode
            return locked  # `encode_batch_padded` would start with an empty cache on each call

        def encode(text: bytes) -> Ids:
            # Unlike `encode`, this call releases the GIL. Unlike `encode_batch`, it does not import
            # awkward, which takes as long as encoding 100 MB.
            rows, _ = tokenizer.encode_batch_padded(BytesSource(text), pad_id=0, parallel=False)
            row: Ids = rows[0]
            return row

        return encode

    def _together(self, documents: list[bytes]) -> EncodedBatch | None:
        """Encode documents in one call; return None if the engines might differ on them.

        A special token other than the ends of documents means that a document contained its string,
        which must be encoded as text.
        """
        text = self._separator.join([*documents, b""])
        if len(text) > self._longest or not self.agrees_on(documents):
            return None
        ids = self.encode_once(text)
        if self._lowest == self._highest:
            places = np.flatnonzero(ids == self._end)
        else:
            places = np.flatnonzero((ids >= self._lowest) & (ids <= self._highest))
            places = places[self._special[ids[places]]]
        if len(places) != len(documents) or (ids[places] != self._end).any():
            return None
        return EncodedBatch(ids, np.diff(places, prepend=-1).astype(np.int32))

    def encode_once(self, text: bytes) -> Ids:
        """Return gigatoken's own ids of a text; strings of added tokens become these tokens."""
        self._room -= len(text)
        if self._room < 0:
            self._encode, self._room = self._open(), CACHED_BYTES
        return self._encode(text)

    def agrees_on(self, documents: list[bytes]) -> bool:
        """Return True if both engines treat all characters in the same way.

        This requires characters that are defined in Python's version of Unicode and, if the
        tokenizer normalises to NFC, text that is already NFC.

        The NFC form of defined characters never changes
        (https://www.unicode.org/policies/stability_policy.html), and their categories hardly ever
        do; the tests compare them. At the time of writing the engines implement Unicode 16 and 17,
        Python 3.11 implements 14 and Python 3.14 implements 16.
        """
        text = b"\n".join(one for one in documents if not one.isascii())
        if not text:
            return True
        content = np.frombuffer(text, np.uint8)
        characters = content[content >= 0x80].tobytes().decode()
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        for code in set(codes[~self._known[codes]].tolist()):
            if unicodedata.category(chr(code)) == "Cn":
                return False
            self._known[code] = True
        return not self._composes or unicodedata.is_normalized("NFC", text.decode())


def _composes(normalizer: Any) -> bool:
    """Return True if the normalizer is NFC.

    Raises UnsupportedTokenizer unless it is NFC, absent, or SentencePiece's replacement of spaces.
    """
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
    raise UnsupportedTokenizer(
        f"it is used with no normalizer or NFC, not {json.dumps(normalizer)[:80]}"
    )


def hard_texts(added_tokens: Iterable[str]) -> list[str]:
    """Return short texts on which tokenizers are known to differ, some with the added tokens."""
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
