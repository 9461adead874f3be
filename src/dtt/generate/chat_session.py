"""A conversation with a model: its history, the limit of the context, and streamed answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtt.base.errors import ConfigError, InputError
from dtt.data.conversations.rows import Conversation, Message, RefusedRow
from dtt.generate.run import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dtt.data.conversations.chat_encoder import ChatEncoder
    from dtt.model.generate import GeneratorPool, PrefixCachedGenerator

ANSWER_SHARE = 4
"""The oldest turns are dropped to keep 1/4 of the context free for an answer, or `max_tokens`."""

SYSTEM = ("system", "developer")
"""Roles of a system prompt."""


@dataclass
class StreamedAnswer:
    """An answer, complete once its text has been streamed."""

    prompt_ids: list[int]
    cached_tokens: int
    """Number of tokens of the prompt that were computed for an earlier answer."""
    dropped_messages: int
    """Number of old messages that were dropped because the context was full."""
    ids: list[int] = field(default_factory=list)
    """Generated tokens, without the stop token."""
    content: str = ""
    finish_reason: Literal["stop", "length", "interrupted"] = "interrupted"

    def stream(
        self,
        tokenizer: Tokenizer,
        tokens: Generator[int],
        stop_tokens: Collection[int],
        *,
        stop_texts: Sequence[str] = (),
        skip_special_tokens: bool = False,
    ) -> Generator[str]:
        """Yield the text of `tokens` as they come, and collect it.

        It ends before any of `stop_tokens` and `stop_texts`, and never within a UTF-8 character.
        """
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        held = ""  # its end may turn out to be the start of a stop text
        with closing(tokens):
            for token in tokens:
                if token in stop_tokens:
                    self.finish_reason = "stop"
                    break
                self.ids.append(token)
                held += decoder.step(tokenizer, token) or ""
                ends = [held.index(stop) for stop in stop_texts if stop in held]
                if ends:
                    self.finish_reason = "stop"
                    held = held[: min(ends)]
                    break
                ready = len(held) - _start_of_stop(held, stop_texts)
                self.content += held[:ready]
                yield held[:ready]
                held = held[ready:]
            else:
                self.finish_reason = "length"
        if held:
            self.content += held
            yield held


def _start_of_stop(text: str, stop_texts: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a stop text begins with."""
    return max(
        (n for stop in stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )


class ChatSession:
    """A conversation with one model.

    Prompts are rendered and encoded by the code that makes training samples. Only tokens after the
    common prefix with the previous prompt and answer are computed.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        tokenizer: Tokenizer,
        generator: PrefixCachedGenerator | GeneratorPool,
        stop_tokens: frozenset[int],
        sampling: Sampling,
    ) -> None:
        """Start without messages. An answer ends before any of `stop_tokens`."""
        self._encoder, self._tokenizer, self._generator = encoder, tokenizer, generator
        self._stop_tokens, self._sampling = stop_tokens, sampling
        self._context = generator.model.arch.max_seq_len
        self._system: tuple[Message, ...] = ()
        self.conversation = Conversation(())

    def another(self, sampling: Sampling) -> ChatSession:
        """Return a conversation with the same model and system prompt, without messages."""
        other = ChatSession(
            self._encoder, self._tokenizer, self._generator, self._stop_tokens, sampling
        )
        other._system = self._system
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
        self.conversation = replace(
            self.conversation, messages=system + _without_system(self.conversation.messages)
        )
        self._system = system

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
        if _without_system(messages) == messages:
            messages = self._system + messages
        return self._start(replace(conversation, messages=messages))

    def _start(self, conversation: Conversation) -> StreamedAnswer:
        fitting, prompt_ids = self._fit(conversation)
        self.conversation = fitting
        return StreamedAnswer(
            prompt_ids,
            self._generator.cached_prefix(prompt_ids),
            len(conversation.messages) - len(fitting.messages),
        )

    def stream(self, answer: StreamedAnswer, *, stop_texts: Sequence[str] = ()) -> Generator[str]:
        """Yield the text of an answer while it is generated, and append it to the conversation.

        If the iterator is closed or interrupted, the text so far is the answer; if there is none,
        the message without an answer is removed.
        """
        tokens = generated(self._generator, answer.prompt_ids, self._sampling)
        try:
            yield from answer.stream(
                self._tokenizer, tokens, self._stop_tokens, stop_texts=stop_texts
            )
        finally:
            self._append(answer)

    def _append(self, answer: StreamedAnswer) -> None:
        """Append an answer to the conversation, or remove the message that has no answer."""
        messages = self.conversation.messages
        if answer.content or answer.finish_reason != "interrupted":
            messages += ({"role": "assistant", "content": answer.content},)
        else:
            messages = messages[:-1]
        self.conversation = replace(self.conversation, messages=messages)

    def _fit(self, conversation: Conversation) -> tuple[Conversation, list[int]]:
        """Return the conversation without the oldest turns that do not fit, and its prompt."""
        room = min(self._sampling.max_tokens, self._context // ANSWER_SHARE)
        while True:
            prompt_ids = self._prompt_ids(conversation)
            shorter = _without_oldest_turn(conversation)
            if len(prompt_ids) + room <= self._context:
                return conversation, prompt_ids
            if shorter is None:
                break
            conversation = shorter
        if len(prompt_ids) < self._context:
            return conversation, prompt_ids
        raise ConfigError(
            f"the message is too long: {len(prompt_ids)} tokens with the template",
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
            return self._encoder.prompt_ids(conversation)
        except RefusedRow as refused:
            raise ConfigError(
                "the conversation cannot be rendered with the chat template",
                why=refused.why,
                next="change the messages, or use another template with --template",
            ) from None


def generated(
    generator: PrefixCachedGenerator | GeneratorPool, prompt_ids: list[int], sampling: Sampling
) -> Generator[int]:
    """Yield the tokens that continue a prompt."""
    import torch

    from dtt.generate.run import prompt_seed

    return generator.generate(
        prompt_ids,
        max_new_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        generator=torch.Generator(generator.device).manual_seed(
            prompt_seed(sampling.seed, prompt_ids)
        ),
    )


def _without_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages[1:] if messages and messages[0]["role"] in SYSTEM else messages


def _without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """Return the conversation without the first user message and the answers to it.

    Returns None if there is no later user message.
    """
    messages = conversation.messages
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(starts) < 2:
        return None
    first, second = starts[:2]
    return replace(conversation, messages=messages[:first] + messages[second:])
