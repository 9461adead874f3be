"""Token ids of rendered conversations, by the fastest engine that yields those of `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from dtt.config.data import Engine
from dtt.data.conversations.loss_mask import AnswerSpan
from dtt.data.conversations.rows import RefusedRow
from dtt.data.text.encoder import EngineChoice
from dtt.data.text.encoding_errors import Unencodable, encoding
from dtt.data.text.gigatoken import EncodedBatch, Gigatoken, UnsupportedTokenizer, hard_texts

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


class ConversationTokens(EngineChoice):
    """A tokenizer of rendered conversations, whose special tokens become special tokens.

    With either engine, the ids are those of `encode(text, add_special_tokens=False)` of
    `tokenizers`.
    """

    def __init__(
        self, content: bytes, facts: dict[str, Any], tokenizer: Tokenizer, engine: Engine = "hf"
    ) -> None:
        """Create it for `tokenizer`, which was created from `content`, a tokenizer.json.

        `facts` are the decoded content. With the engine `auto` or `gigatoken`, call `choose_engine`
        before encoding.
        """
        self._tokenizer, self._patterns = tokenizer, b'"Regex"' in content
        self._added = [token["content"] for token in facts.get("added_tokens") or ()]
        self._sizes = _byte_sizes(facts)
        self._composes = facts.get("normalizer") is not None
        super().__init__(engine, lambda: self._open(content, facts))

    def _open(self, content: bytes, facts: dict[str, Any]) -> Gigatoken:
        """Return gigatoken; UnsupportedTokenizer if it ignores parts of the tokenizer."""
        if self._sizes is None:
            raise UnsupportedTokenizer(
                "conversations need a byte-level tokenizer, with no normalizer or NFC"
            )
        added = facts.get("added_tokens") or ()
        if any(part.get("add_prefix_space") for part in _byte_level_parts(facts)):
            raise UnsupportedTokenizer(
                "the tokenizer adds a space to the text after each special token"
            )
        for flag in ("single_word", "lstrip", "rstrip"):
            if any(token[flag] for token in added):
                raise UnsupportedTokenizer(f"an added token has {flag}")
        special = {token["content"]: token["id"] for token in added if token["special"]}
        # Special tokens without others inside can separate texts that do not contain them.
        alone = (t for t in special if not any(t in other for other in self._added if t != other))
        self._separators = [(token.encode(), special[token]) for token in alone]
        if not self._separators:
            raise UnsupportedTokenizer("the tokenizer has no special tokens")
        name = self._separators[0][0].decode()

        def never(documents: list[bytes]) -> EncodedBatch:
            raise AssertionError("conversations are not encoded as documents")

        return Gigatoken(content, facts.get("normalizer"), special, name, never)

    def engine_problem(self, sample: Sequence[str]) -> str | None:
        """Return the reason why gigatoken cannot be used, or None if it can.

        Both engines encode `sample` and texts with the added tokens that are hard to split.
        """
        if self._fast is None:
            return self._problem
        hard = hard_texts(self._added)
        pairs = [f"{a}{b} {a}\n{b}" for a, b in zip(self._added, self._added[1:], strict=False)]
        for text in [*sample, *hard, *pairs, *(f"{self._added[-1]}{text}" for text in hard)]:
            (ours,), (exact,) = self._gigatoken([text]), self.exact([text])
            if isinstance(exact, RefusedRow):
                continue
            if ours is not None and not all(map(np.array_equal, ours, exact)):
                return f"gigatoken returns different ids for {text[:60]!r}"
        return None

    def encode(self, texts: list[str]) -> list[EncodedText | RefusedRow]:
        """Encode texts; the result for one that the tokenizer cannot encode is the reason."""
        if self._fast is None:
            return self.exact(texts)
        found = self._gigatoken(texts)
        exact = iter(self.exact([text for text, one in zip(texts, found, strict=True) if not one]))
        return [one or next(exact) for one in found]

    def exact(
        self, texts: list[str], stand_in: tuple[Tokenizer, str] | None = None
    ) -> list[EncodedText | RefusedRow]:
        """Encode texts with `tokenizers`, or one by a stand-in with its text of the same length."""
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
            return self.exact(texts[:middle]) + self.exact(texts[middle:])
        return [self._located(*pair) for pair in zip(texts, encodings, strict=True)]

    def _located(self, text: str, one: Encoding) -> EncodedText:
        """Return the ids of an encoding of `tokenizers` with the positions of the tokens.

        Byte-level tokenizers without a normalizer need no offsets from `tokenizers`, which are
        slow to convert: the sizes of the tokens add up. Then the places are in bytes.
        """
        ids = np.array(one.ids, np.uint32)
        if self._sizes is not None and not self._composes:
            data = text.encode()
            sizes = self._sizes[ids]
            ends = np.cumsum(sizes)
            if (ends[-1] if len(ends) else 0) == len(data):
                return EncodedText(ids, data, ends - sizes, ends)
        offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
        return EncodedText(ids, text, offsets[:, 0].copy(), offsets[:, 1].copy())

    def _gigatoken(self, texts: list[str]) -> list[EncodedText | None]:
        """Encode texts with gigatoken; the result is None where the engines might differ.

        Texts are encoded in one call, separated by a special token that none of them contains. If
        the engines might differ, or the separators are not where they must be, the batch is halved
        until only the texts in question are left.
        """
        assert self._fast is not None
        assert self._sizes is not None
        data = [text.encode() for text in texts]
        joined = b"\xff".join(data)  # no UTF-8 text contains this byte
        separator, end = next(
            (one for one in self._separators if one[0] not in joined), self._separators[0]
        )
        lengths = np.fromiter(map(len, data), np.int64, len(data))
        borders = np.cumsum(lengths + len(separator))
        ids = np.empty(0, np.uint32)
        if self._fast.agrees_on(data):
            ids = self._fast.encode_once(separator.join([*data, b""]))
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        places = np.flatnonzero(ids == end)
        if not np.array_equal(ends[places], borders):
            if len(texts) == 1:
                return [None]
            middle = len(texts) // 2
            return self._gigatoken(texts[:middle]) + self._gigatoken(texts[middle:])
        begins = (borders - lengths - len(separator)).tolist()
        found, first = list[EncodedText | None](), 0
        for text, content, last, begin in zip(texts, data, places.tolist(), begins, strict=True):
            stops = ends[first:last] - begin
            one = EncodedText(ids[first:last], content, stops - sizes[first:last], stops)
            found.append(_in_characters(one, text) if self._composes else one)
            first = last + 1
        return found


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


def _in_characters(one: EncodedText, text: str) -> EncodedText:
    """Convert positions in bytes to characters, in which `tokenizers` counts."""
    if text.isascii():
        return one._replace(text=text)
    leads = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
    character = np.cumsum(leads) - 1  # [bytes]: index of the character of each byte
    return one._replace(text=text, starts=character[one.starts], ends=character[one.ends - 1] + 1)


def _byte_sizes(facts: dict[str, Any]) -> npt.NDArray[np.int64] | None:
    """Return the number of bytes of each token, [ids]; None if this cannot be determined.

    In the vocabulary of a byte-level tokenizer, each character represents one byte. The sizes of
    the tokens of a text add up unless the normalizer, NFC, changes it.
    """
    vocabulary = facts["model"].get("vocab")
    if not _byte_level_parts(facts) or not isinstance(vocabulary, dict):
        return None
    if (facts.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return None
    added_tokens = facts.get("added_tokens") or ()
    largest = max([*vocabulary.values(), *(added["id"] for added in added_tokens)])
    sizes = np.zeros(largest + 1, np.int64)
    sizes[[*vocabulary.values()]] = [*map(len, vocabulary)]
    for added in added_tokens:
        sizes[added["id"]] = len(added["content"].encode())
    return sizes


def _byte_level_parts(facts: dict[str, Any]) -> list[dict[str, Any]]:
    pre = facts.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers") or [pre]
    return [part for part in parts if part.get("type") == "ByteLevel"]
