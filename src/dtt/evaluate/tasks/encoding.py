"""Encoding of questions: the token ids of options, prompts and rolling windows.

A context and its continuation are encoded together, as the tokenizer encodes them in running text;
the continuation is what follows the tokens of the context. lm-evaluation-harness does the same, so
its scores and those of dtt are those of the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from dtt.base.errors import ConfigError, InputError
from dtt.data.text.encoding_errors import encoding
from dtt.evaluate.tasks.options import Option
from dtt.evaluate.tasks.prompts import Question

Ids = tuple[int, ...]


@dataclass(frozen=True)
class EncodedQuestion:
    """The options of a question as token ids."""

    options: tuple[Option, ...]
    truncated: bool
    """True if the start of an option did not fit the model."""
    separate: bool
    """True if a continuation had no token of its own in the joint encoding, so that context and
    continuation were encoded separately."""
    bytes: tuple[int, ...]
    """Size of each continuation in UTF-8 bytes, with its leading space."""


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
        added = _added_in_front(tokenizer)
        if bos == "always" and not added:
            if end_of_document is None:
                raise _no_first_token()
            added = [end_of_document]
        self._bos = [] if bos == "never" else added
        prefix = added[-1:] if added and bos != "never" else [end_of_document]
        self._prefix = prefix[0]
        self._bos_text = tokenizer.decode(added, skip_special_tokens=False) if added else ""

    @property
    def in_chat(self) -> bool:
        """True if prompts are rendered in a conversation format."""
        return self._chat is not None

    def options(self, question: Question) -> EncodedQuestion:
        """Return the options of a question, in order: its continuations, or its contexts."""
        pairs = [
            _with_trailing_space(context, continuation)
            for context in question.contexts
            for continuation in question.continuations
        ]
        known = self._contexts_and_wholes(pairs)
        options, truncated, separate = [], False, False
        for context, continuation in pairs:
            ids, alone = self._option(context, continuation, known)
            separate |= alone
            truncated |= len(ids.context) + len(ids.continuation) > self.max_seq_len + 1
            fitted = self._fitted(ids)
            self._check_ids(fitted.context + fitted.continuation, f"question {question.id}")
            options.append(fitted)
        sizes = tuple(len(continuation.encode()) for _, continuation in pairs)
        return EncodedQuestion(tuple(options), truncated, separate, sizes)

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
        prompt = [*(ids or [self._prefix_token()])]
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
        tokens = [self._prefix_token(), *ids]
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
            return Option(
                before or (self._prefix_token(),), self._ids_or_eod(ids, continuation)
            ), not ids
        if not context:
            ids = self._encode_plain(continuation)
            if ids[:1] == (self._prefix_token(),) and len(ids) > 1:
                return Option(ids[:1], ids[1:]), False
            return Option((self._prefix_token(),), self._ids_or_eod(ids, continuation)), not ids
        after = known[context + continuation][len(before) :]
        if before and after:
            return Option(before, after), False
        ids = self._ids_or_eod(after or self._encode_plain(continuation), continuation)
        return Option(before or (self._prefix_token(),), ids), not after

    def _fitted(self, option: Option) -> Option:
        """Return the last tokens of an option that the model can read; one is the context."""
        whole = (option.context + option.continuation)[-(self.max_seq_len + 1) :]
        start = max(1, len(whole) - len(option.continuation))
        return Option(whole[:start], whole[start:])

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

    def _prefix_token(self) -> int:
        """Return the token that stands for an empty context."""
        if self._prefix is None:
            raise _no_first_token()
        return self._prefix

    def _ids_or_eod(self, ids: Ids, text: str) -> Ids:
        """Return `ids`, or the end-of-document token for text that has no tokens."""
        if ids:
            return ids
        if self.end_of_document is None:
            raise InputError(
                f"the tokenizer has no tokens for {text[:40]!r}",
                next="use a tokenizer that can encode any text",
            )
        return (self.end_of_document,)


def _with_trailing_space(context: str, continuation: str) -> tuple[str, str]:
    """Move the white space at the end of the context to the start of the continuation."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def _no_first_token() -> ConfigError:
    return ConfigError(
        "there is no token to begin with",
        why="the tokenizer adds none, and the end-of-document token is not known",
        next="evaluate a model with an end-of-document token",
    )


def _added_in_front(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer itself adds in front of a text."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    added = []
    for id, special in zip(encoded.ids, encoded.special_tokens_mask, strict=True):
        if not special:
            break
        added.append(id)
    return added
