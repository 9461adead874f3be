"""Special-token strings in the contents of messages, which must not become special tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dtt.data.conversations.rows import Conversation
from dtt.data.conversations.sandbox import FROM_ROW, STAND_INS
from dtt.data.text.tokenizer import parse_tokenizer


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
        if not any(map(self._places, _strings(conversation))):
            return None
        return replace(
            conversation,
            messages=tuple(
                {key: value if key == "role" else self._mark(value) for key, value in one.items()}
                for one in conversation.messages
            ),
            tools=self._mark(conversation.tools),
            template_kwargs=self._mark(conversation.template_kwargs),
        )

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


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a conversation or a JSON value except the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, Conversation):
        for message in value.messages:
            for key, item in message.items():
                if key != "role":
                    yield from _strings(item)
        yield from _strings(value.tools)
        yield from _strings(value.template_kwargs)
