"""Token ids of rendered conversations, those of `tokenizers`, and where each token is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from dtt.data.conversations.loss_mask import AnswerSpan
from dtt.data.conversations.rows import RefusedRow
from dtt.data.text.encoding_errors import Unencodable, encoding
from dtt.data.text.tokenizer import sections

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


class EncodedText(NamedTuple):
    """The token ids of a text, and the position of each token in it."""

    ids: Ids
    """[tokens]"""
    text: str | bytes
    """The text in the units of the offsets: characters, or bytes of UTF-8."""
    starts: Places
    """[tokens]: start of each token."""
    ends: Places
    """[tokens]: end of each token."""


class ConversationTokens:
    """A tokenizer of rendered conversations, whose special tokens become special tokens.

    gigatoken, which encodes text, would take a third of the CPU time (0.14 instead of 0.41 ms a
    row), and 110 lines to know where it agrees; `tokenizers` uses all cores.
    """

    def __init__(self, content: bytes, facts: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Create it for `tokenizer`, which was created from `content`, a tokenizer.json.

        `facts` are the decoded content.
        """
        self._tokenizer, self._patterns = tokenizer, b'"Regex"' in content
        self._sizes = _byte_sizes(facts)

    def encode(
        self, texts: list[str], stand_in: tuple[Tokenizer, str] | None = None
    ) -> list[EncodedText | RefusedRow]:
        """Encode texts, or one by a stand-in with its text of the same length.

        The result for one that the tokenizer cannot encode is the reason. The ids are those of
        `encode(text, add_special_tokens=False)`.
        """
        tokenizer, inputs = self._tokenizer, texts
        if stand_in is not None:
            tokenizer, inputs = stand_in[0], [stand_in[1]]
        try:
            with encoding("the tokenizer", patterns=self._patterns):
                # A batch: `encode` alone keeps the lock of Python, and other answers would wait.
                encodings = tokenizer.encode_batch(inputs, add_special_tokens=False)
        except Unencodable as error:
            if len(texts) == 1:
                return [RefusedRow(f"the tokenizer cannot encode it: {error.why}")]
            middle = len(texts) // 2  # halved, until only the text in question is left
            return self.encode(texts[:middle]) + self.encode(texts[middle:])
        return [self._located(*pair) for pair in zip(texts, encodings, strict=True)]

    def _located(self, text: str, one: Encoding) -> EncodedText:
        """Return the ids of an encoding of `tokenizers` with the positions of the tokens.

        Byte-level tokenizers without a normalizer need no offsets from `tokenizers`, which are
        slow to convert: the sizes of the tokens add up. Then the places are in bytes.
        """
        ids = np.array(one.ids, np.uint32)
        if self._sizes is not None:
            data = text.encode()
            sizes = self._sizes[ids]
            ends = np.cumsum(sizes)
            if (ends[-1] if len(ends) else 0) == len(data):
                return EncodedText(ids, data, ends - sizes, ends)
        offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
        return EncodedText(ids, text, offsets[:, 0].copy(), offsets[:, 1].copy())


def in_units(answer: AnswerSpan, text: str, encoded: str | bytes) -> AnswerSpan:
    """Return a span in the units of `encoded`: bytes of UTF-8, or characters."""
    if isinstance(encoded, str) or len(encoded) == len(text):
        return answer
    start = len(text[: answer.start].encode())
    end = start + len(text[answer.start : answer.end].encode())
    return replace(answer, start=start, end=end)


def overlap(encoded: EncodedText, answer: AnswerSpan) -> tuple[int, int]:
    """Return the range of the tokens that overlap an answer."""
    first = int(encoded.ends.searchsorted(answer.start, side="right"))
    last = int(encoded.starts.searchsorted(answer.end, side="left"))
    return first, last


def _byte_sizes(facts: dict[str, Any]) -> npt.NDArray[np.int64] | None:
    """Return the number of bytes of each token, [ids]; None if this cannot be determined.

    In the vocabulary of a byte-level tokenizer, each character represents one byte. The sizes of
    the tokens of a text add up unless a normalizer changes it.
    """
    vocabulary = facts["model"].get("vocab")
    parts = sections(facts.get("pre_tokenizer"))
    if not isinstance(vocabulary, dict) or not any(part["type"] == "ByteLevel" for part in parts):
        return None
    if facts.get("normalizer") is not None:
        return None
    added_tokens = facts.get("added_tokens") or ()
    largest = max([*vocabulary.values(), *(added["id"] for added in added_tokens)])
    sizes = np.zeros(largest + 1, np.int64)
    sizes[[*vocabulary.values()]] = [*map(len, vocabulary)]
    for added in added_tokens:
        sizes[added["id"]] = len(added["content"].encode())
    return sizes
