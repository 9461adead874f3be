"""A conversation with a model: its history, the limit of the context, and streamed answers."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Generator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from dtt.base.errors import ConfigError, InputError
from dtt.data.conversations.rows import Conversation, Message, RefusedRow
from dtt.data.text.continuation import Continuation
from dtt.data.text.tokenizer import most_characters
from dtt.generate.run import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dtt.data.conversations.chat_encoder import ChatEncoder
    from dtt.hf.read import LoadedModel
    from dtt.model.generate import GeneratorPool

ANSWER_SHARE = 4
"""The oldest turns are dropped to keep 1/4 of the context free for an answer, or `max_tokens`."""


class StreamedAnswer(Continuation):
    """An answer, complete once its text has been streamed."""

    dropped_messages = 0
    """Number of old messages that were dropped because the context was full."""

    def __init__(
        self,
        generator: GeneratorPool,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        sampling: Sampling,
        stop_tokens: Collection[int],
        stop_texts: Sequence[str],
        *,
        show_special: bool = False,
    ) -> None:
        """Generate nothing yet; `Continuation` describes the other arguments."""
        super().__init__(tokenizer, prompt_ids, stop_tokens, stop_texts, show_special=show_special)
        self._generator, self.sampling = generator, sampling
        self.cached_tokens = generator.cached_prefix(prompt_ids)
        """Number of tokens of the prompt that were computed for an earlier answer."""

    def texts(self) -> Generator[str]:
        """Yield the text while it is generated."""
        own = self.sampling.generator(self._generator.device, self.prompt_ids)
        options = self.sampling.options
        return self.stream(self._generator.generate(self.prompt_ids, generator=own, **options))


class ChatSession:
    """A conversation with one model.

    Prompts are rendered and encoded by the code that makes training samples. Only tokens after the
    common prefix with the previous prompt and answer are computed.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        trained: LoadedModel,
        generator: GeneratorPool,
        sampling: Sampling,
    ) -> None:
        """Start without messages."""
        self._encoder, self._generator, self.sampling = encoder, generator, sampling
        self._tokenizer, self._check_ids = trained.open_tokenizer(), trained.check_ids
        self._stop_tokens = frozenset(trained.stop_tokens(encoder))
        self.stop_texts: Sequence[str] = ()
        self._context = generator.model.arch.max_seq_len
        self._system: tuple[Message, ...] = ()
        self.conversation = Conversation(())

    def another(self, sampling: Sampling, stop_texts: Sequence[str]) -> ChatSession:
        """Return a conversation with the same model and system prompt, without messages.

        Its answers end before any of `stop_texts`, too.
        """
        other = copy(self)
        other.sampling, other.stop_texts = sampling, stop_texts
        other.conversation = Conversation(())
        return other

    def reset(self) -> None:
        """Forget all messages except the system prompt."""
        self.conversation = Conversation(self._system)

    def set_system(self, text: str) -> None:
        """Replace the system prompt; an empty text removes it.

        Raises ConfigError if the template refuses system prompts.
        """
        system: tuple[Message, ...] = ({"role": "system", "content": text},) if text else ()
        probe: Message = {"role": "user", "content": "."}
        self._prompt_ids(Conversation((*system, probe)))
        messages = self.conversation.messages
        messages = system + (messages[1:] if _has_system(messages) else messages)
        self.conversation, self._system = replace(self.conversation, messages=messages), system

    def ask(self, *messages: Message) -> StreamedAnswer:
        """Append messages, and return the answer to the last one, which `stream` generates.

        Drops the oldest turns if the context is full. Raises ConfigError for a message that is too
        long or that the template refuses; the conversation is then unchanged.
        """
        return self._start(
            replace(self.conversation, messages=self.conversation.messages + messages)
        )

    def start(self, conversation: Conversation) -> StreamedAnswer:
        """Replace the conversation, and return the answer to its last message, as `ask` does.

        A conversation without a system prompt gets that of the session.
        """
        messages = conversation.messages
        system = () if _has_system(messages) else self._system
        return self._start(replace(conversation, messages=system + messages))

    def _start(self, conversation: Conversation) -> StreamedAnswer:
        fitting, prompt_ids = self._fit(conversation)
        self.conversation = fitting
        how = self.sampling, self._stop_tokens, self.stop_texts
        answer = StreamedAnswer(
            self._generator, self._tokenizer, prompt_ids, *how, show_special=True
        )
        answer.dropped_messages = len(conversation.messages) - len(fitting.messages)
        return answer

    def stream(self, answer: StreamedAnswer) -> Generator[str]:
        """Yield the text of an answer while it is generated, and append it to the conversation.

        If the iterator is closed or interrupted, the text so far is the answer; if there is none,
        the message without an answer is removed.
        """
        try:
            yield from answer.texts()
        finally:
            messages = self.conversation.messages
            if answer.content or answer.finish_reason != "interrupted":
                messages += ({"role": "assistant", "content": answer.content},)
            else:
                messages = messages[:-1]
            self.conversation = replace(self.conversation, messages=messages)

    def _fit(self, conversation: Conversation) -> tuple[Conversation, list[int]]:
        """Return the conversation without the oldest turns that do not fit, and its prompt."""
        room = min(self.sampling.max_tokens, self._context // ANSWER_SHARE)
        most = most_characters(self._tokenizer, self._context)
        messages = conversation.messages
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]

        def without(turns: int) -> Conversation:
            """Return the conversation without its first questions and the answers to them."""
            kept = messages[: starts[0]] + messages[starts[turns] :] if turns else messages
            return replace(conversation, messages=kept)

        @cache
        def prompt(dropped: int) -> list[int] | None:
            """Return the ids of a prompt; None for more text than the context can have."""
            shorter = without(dropped)
            return None if _characters(shorter) > most else self._prompt_ids(shorter)

        def fits(dropped: int) -> bool:
            return (ids := prompt(dropped)) is not None and len(ids) + room <= self._context

        droppable = max(0, len(starts) - 1)
        # First all turns, which mostly fit; then halving, because each attempt renders and encodes
        # all turns that are left.
        dropped = 0 if fits(0) else bisect_left(range(1, droppable), True, key=fits) + 1
        dropped = min(dropped, droppable)
        shorter, ids = without(dropped), prompt(dropped)
        if ids is not None and len(ids) < self._context:
            return shorter, ids
        size = f"{_characters(shorter)} characters" if ids is None else f"{len(ids)} tokens"
        raise ConfigError(
            f"the message is too long: {size} with the template",
            why=f"system prompt, message and answer must fit into {self._context} tokens",
        )

    def _prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of a prompt; ConfigError if the conversation has no valid prompt."""
        last = conversation.messages[-1]
        if last["role"] == "assistant":
            raise ConfigError(
                "the last message has the role assistant, so there is nothing to answer"
            )
        try:
            json.dumps(conversation.messages, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError("a message is not UTF-8 text", why=str(error)) from None
        try:
            ids = self._encoder.prompt_ids(conversation)
        except RefusedRow as refused:
            raise ConfigError(
                "the conversation cannot be rendered with the chat template",
                why=refused.why,
                next="change the messages, or use another template with --template",
            ) from None
        self._check_ids(ids, "the conversation")
        return ids


def _has_system(messages: tuple[Message, ...]) -> bool:
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def _characters(conversation: Conversation) -> int:
    """Return the number of characters of the messages."""
    texts = (message.get("content") for message in conversation.messages)
    return sum(len(text) for text in texts if isinstance(text, str))
