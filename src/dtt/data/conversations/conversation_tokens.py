"""Token ids of rendered conversations, where each token is, and which are special.

The strings of special tokens in the contents of messages must not become special tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from dtt.data.conversations.loss_mask import AnswerSpan
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.sandbox import FROM_ROW, STAND_INS
from dtt.data.text.tokenizer import parse_tokenizer, sections
from dtt.data.text.unencodable import Unencodable, encoding

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


class ControlText:
    """The strings of a tokenizer's special tokens, distinguished by origin: template or row.

    In the text of a conversation the template writes some of them, and a row may contain others.
    To distinguish them, `mark` puts the mark FROM_ROW into the strings of the row, and a render
    shows where the marks end up. A mark precedes each character at which a special token begins.
    It also precedes the start of a string that could complete a special token, and the end of a
    string that could begin one, because templates join strings.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        """Create it for the strings of special tokens; those of white space only are left out."""
        self.tokens = sorted((t for t in special_tokens if t.strip()), key=lambda t: (-len(t), t))
        self._pattern = re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")
        self._longest = max(map(len, self.tokens), default=0)
        self._begins = frozenset(t[:n] for t in self.tokens for n in range(1, len(t)))
        self._ends = frozenset(t[-n:] for t in self.tokens for n in range(1, len(t)))
        self._firsts = frozenset(t[0] for t in self.tokens)
        self._lasts = frozenset(t[-1] for t in self.tokens)

    def mark(self, conversation: Conversation) -> Conversation | None:
        """Return a conversation with marks, or None if it contains nothing to mark.

        Roles are not marked, because only known ones are valid and templates compare them.
        """
        marked = replace(
            conversation,
            messages=tuple(
                {key: value if key == "role" else self._mark(value) for key, value in one.items()}
                for one in conversation.messages
            ),
            tools=self._mark(conversation.tools),
            template_kwargs=self._mark(conversation.template_kwargs),
        )
        return None if marked == conversation else marked

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            places = self._places(value)
            if not places:
                return value
            ends = [*places[1:], len(value)]
            parts = [value[a:b] for a, b in zip(places, ends, strict=True)]
            return value[: places[0]] + FROM_ROW + FROM_ROW.join(parts)
        if isinstance(value, dict):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item) for item in value]
        return value

    def _places(self, text: str) -> list[int]:
        """Return the indices of the characters to mark, in order."""
        places: set[int] = set()
        at = self._pattern.search(text)
        while at is not None:
            places.add(at.start())
            at = self._pattern.search(text, at.start() + 1)
        head, size = text[: self._longest], len(text)
        if not self._lasts.isdisjoint(head) and any(
            head[:n] in self._ends for n in range(1, len(head) + 1)
        ):
            places.add(0)
        tail = max(0, size - self._longest)
        if not self._firsts.isdisjoint(text[tail:]):
            places.update(i for i in range(tail, size) if text[i:] in self._begins)
        return sorted(places)

    def find(self, text: str, from_row: list[int]) -> tuple[list[tuple[int, str]], list[str]]:
        """Return the special tokens in a text: (position, token) of the template's, and the row's.

        `from_row` lists the positions of the marks, in order.
        """
        written: list[tuple[int, str]] = []
        contained: list[str] = []
        at = self._pattern.search(text)
        while at is not None:
            mark = bisect_left(from_row, at.start())
            if mark < len(from_row) and from_row[mark] < at.end():
                contained.append(at.group())
                at = self._pattern.search(text, at.start() + 1)
            else:
                written.append((at.start(), at.group()))
                at = self._pattern.search(text, at.end())
        return written, contained


class StandInTokenizer:
    """A tokenizer whose special tokens have different strings of the same length.

    It encodes the original strings as ordinary text, and the stand-ins as the special tokens. So
    nothing but the special tokens that the template wrote can become one.
    """

    def __init__(self, content: bytes, special: Iterable[str], where: Path | str) -> None:
        """Create it from the content of a tokenizer.json."""
        facts = json.loads(content)
        self._names: dict[str, str] = {}
        taken: set[str] = set()
        for token in special:
            name = next(name for sign in STAND_INS if (name := sign + token[1:]) not in taken)
            taken.add(name)
            self._names[token] = name
        for added in facts["added_tokens"]:
            if added["content"] in self._names:
                added |= {"content": self._names[added["content"]], "normalized": False}
        model = facts["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._names.get(t, t): i for t, i in vocabulary.items()}
            if "merges" in model:
                model["merges"] = [merge for merge in model["merges"] if self._is_text(merge)]
        elif isinstance(vocabulary, list):  # unigram: pairs of token and score
            model["vocab"] = [[self._names.get(t, t), score] for t, score in vocabulary]
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        facts["post_processor"] = None
        self.tokenizer: Tokenizer = parse_tokenizer(json.dumps(facts).encode(), where)

    def _is_text(self, merge: str | list[str]) -> bool:
        """Return True if a merge of BPE neither makes a special token nor continues one."""
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return self._names.keys().isdisjoint((left, right, left + right))

    def text(self, text: str, written: list[tuple[int, str]]) -> str:
        """Return a text with stand-ins for the special tokens at the given positions."""
        characters = list(text)
        for place, token in written:
            characters[place] = self._names[token][0]
        return "".join(characters)
