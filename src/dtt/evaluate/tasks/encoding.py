"""Encoding of questions: the token ids of options, prompts and rolling windows.

A context and its continuation are encoded together, as the tokenizer encodes them in running text;
the continuation is what follows the tokens of the context. lm-evaluation-harness does the same, so
its scores and those of dtt are those of the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from dtt.base.errors import ConfigError, InputError
from dtt.data.text.unencodable import encoding
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.scorer import Option

Ids = tuple[int, ...]


class EncodedQuestion(NamedTuple):
    """The options of a question as token ids."""

    options: tuple[Option, ...]
    bytes: tuple[int, ...]
    """Size of each continuation in UTF-8 bytes, with its leading space."""
    truncated: bool
    """True if the start of an option did not fit the model."""
    separate: bool
    """True if a continuation had no token of its own in the joint encoding, and so was encoded by
    itself."""


class QuestionEncoder:
    """Encodes questions with the tokenizer of a model.

    `bos` decides what comes before each context: what the tokenizer itself adds, if anything; with
    "always", the end-of-document token if it adds nothing; with "never", nothing. An empty context
    becomes the beginning-of-sequence token, or else the end-of-document token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_of_document: int | None,
        max_seq_len: int,
        bos: Literal["tokenizer", "always", "never"],
        chat: Callable[[str], list[int]] | None = None,
        check_ids: Callable[[Sequence[int], str], None] = lambda ids, name: None,
    ) -> None:
        """Use `chat`, if given, to render each context as a message of a user, as token ids.

        `max_seq_len` is the maximum number of tokens that the model reads. `check_ids` raises
        ConfigError for ids that the model has no rows for, of a question with a name; during
        training there are none, as the model is made for the tokenizer.
        """
        self._check_ids = check_ids
        self.max_seq_len = max_seq_len
        self.end_of_document = end_of_document
        self.tokenizer = tokenizer
        self._chat = chat
        # What the tokenizer itself adds in front of a text.
        encoded = tokenizer.encode("a", add_special_tokens=True)
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        added = [id for id, _ in takewhile(lambda pair: pair[1], pairs)]
        if bos == "always" and not added:
            added = [self._prefix_token(end_of_document)]
        self._bos = [] if bos == "never" else added
        self._prefix = added[-1] if added and bos != "never" else end_of_document
        self._bos_text = tokenizer.decode(added, skip_special_tokens=False) if added else ""

    @property
    def in_chat(self) -> bool:
        """True if prompts are rendered in a conversation format."""
        return self._chat is not None

    def options(self, question: Question) -> EncodedQuestion:
        """Return the options of a question, in order: its continuations, or its contexts."""
        pairs = []
        for context in question.contexts:
            bare = context.rstrip()  # the white space at the end goes to the continuation
            pairs += [(bare, context[len(bare) :] + text) for text in question.continuations]
        known = self._contexts_and_wholes(pairs)
        options, truncated, separate = [], False, False
        for context, continuation in pairs:
            ids, alone = self._option(context, continuation, known)
            whole = ids.context + ids.continuation
            separate |= alone
            truncated |= len(whole) > self.max_seq_len + 1
            # The last tokens that the model can read; at least one is the context.
            whole = whole[-(self.max_seq_len + 1) :]
            start = max(1, len(whole) - len(ids.continuation))
            self._check_ids(whole, f"question {question.id}")
            options.append(Option(whole[:start], whole[start:]))
        sizes = tuple(len(continuation.encode()) for _, continuation in pairs)
        return EncodedQuestion(tuple(options), sizes, truncated, separate)

    def check_room(self, max_new_tokens: int, task: str = "") -> None:
        """Raise ConfigError if a prompt and `max_new_tokens` more tokens cannot fit the model."""
        if max_new_tokens >= self.max_seq_len:
            raise ConfigError(
                "there is no room for a prompt",
                where=f"max_tokens of the task {task}" if task else None,
                why=f"it is {max_new_tokens}, and the model reads {self.max_seq_len} tokens",
                next="set a smaller max_tokens in the task",
            )

    def prompt_ids(self, question: Question, max_new_tokens: int) -> tuple[list[int], bool]:
        """Return the ids of the prompt of a generation question, and True if it was truncated.

        The start of a prompt is cut off so that it fits the model with `max_new_tokens` more.
        Raises ConfigError if none can.
        """
        self.check_room(max_new_tokens)
        room = self.max_seq_len - max_new_tokens
        [context] = question.contexts
        ids = self._chat(context) if self._chat else self._encoded([context])[0]
        prompt = [*(ids or [self._prefix_token(self._prefix)])]
        self._check_ids(prompt[-room:], f"question {question.id}")
        return prompt[-room:], len(prompt) > room

    def windows(self, text: str) -> list[Option]:
        """Return disjoint windows over a text: each of its tokens is in one continuation.

        As in lm-evaluation-harness, each window fills the context of the model, except for the
        last one, whose context is filled up with tokens of the window before.
        """
        ids, length = list(self._encode_plain(text)), self.max_seq_len
        if not ids:
            return []
        tokens = [self._prefix_token(self._prefix), *ids]
        self._check_ids(tokens, f"the text {text[:40]!r}")
        windows = [(1, min(length, len(ids)) + 1)]
        while windows[-1][1] < len(tokens):
            start = windows[-1][1]
            windows.append((start, min(start + length, len(tokens))))
        return [
            Option(tuple(tokens[max(0, stop - length - 1) : start]), tuple(tokens[start:stop]))
            for start, stop in windows
        ]

    def _contexts_and_wholes(self, pairs: list[tuple[str, str]]) -> dict[str, Ids]:
        """Return the ids of each context, and of each context with its continuation."""
        contexts = dict.fromkeys(context for context, _ in pairs if context)
        if self._chat is not None:
            return {context: tuple(self._chat(context)) for context in contexts}
        wholes = dict.fromkeys(context + text for context, text in pairs if context)
        texts = [*(contexts | wholes)]
        return dict(zip(texts, self._encoded(texts), strict=True))

    def _option(
        self, context: str, continuation: str, known: Mapping[str, Ids]
    ) -> tuple[Option, bool]:
        """Return an option, and True if its continuation was encoded separately.

        `known` has the ids of the context, and of the context with the continuation.
        """
        before = known.get(context, ())
        if self._chat is not None:
            # The answer starts its own message, so no space separates it from the question.
            ids = self._encode_plain(continuation.lstrip()) or self._encode_plain(continuation)
            alone = not ids
        elif not context:
            ids = self._encode_plain(continuation)
            if ids[:1] == (self._prefix_token(self._prefix),) and len(ids) > 1:
                return Option(ids[:1], ids[1:]), False
            alone = not ids
        else:
            ids = known[context + continuation][len(before) :]
            if before and ids:
                return Option(before, ids), False
            alone = not ids
            ids = ids or self._encode_plain(continuation)
        end = () if self.end_of_document is None else (self.end_of_document,)
        if not ids and not end:
            raise InputError(
                f"the tokenizer has no tokens for {continuation[:40]!r}",
                next="use a tokenizer that can encode any text",
            )
        # Text that has no tokens becomes the end-of-document token.
        before = before or (self._prefix_token(self._prefix),)
        return Option(before, ids or end), alone

    def _encoded(self, texts: list[str]) -> list[Ids]:
        """Return the ids of texts, each with the BOS in front unless its text begins with it."""
        with encoding("the tokenizer"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        bos, written = tuple(self._bos), self._bos_text
        return [
            tuple(one.ids) if written and text.startswith(written) else (*bos, *one.ids)
            for text, one in zip(texts, encodings, strict=True)
        ]

    def _encode_plain(self, text: str) -> Ids:
        with encoding("the tokenizer"):
            return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @staticmethod
    def _prefix_token(token: int | None) -> int:
        """Return the token that stands for an empty context."""
        if token is None:
            raise ConfigError(
                "there is no token to begin with",
                why="the tokenizer adds none, and the end-of-document token is not known",
                next="evaluate a model with an end-of-document token",
            )
        return token
