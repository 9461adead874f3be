"""The text that a model adds to a prompt, decoded token by token."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import Literal

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder returns for bytes that are no UTF-8 text, such as a part of a character."""
HELD_TOKENS = 3
"""Most tokens that an incomplete character can have: 3 of its 4 bytes."""


class TokenDecoder:
    """Decodes the tokens behind a prompt: the text is that of prompt and tokens together.

    A token alone has another text: SentencePiece decoders remove the space before the first word.
    `tokenizers.decoders.DecodeStream` raises an exception at bytes that are no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, show_special: bool
    ) -> None:
        """Start behind a prompt. Without `show_special`, special tokens have no text."""
        added = tokenizer.get_added_tokens_decoder().items()
        self._hidden = {i for i, token in added if token.special and not show_special}
        self._tokenizer = tokenizer
        self._ids = [token for token in prompt_ids if token not in self._hidden]
        """Tokens that the text of the next ones depends on, and those without a text yet."""
        self._read = len(self._ids)
        """Number of `_ids` whose text was returned."""

    def add(self, token: int) -> str:
        """Return the text that a token completes; it never ends within a character."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        if not self._decode(0, len(self._ids)).endswith(REPLACEMENT):
            return self.end()
        # More tokens than an incomplete character has: the first of them is no text.
        return self._take(len(self._ids) - HELD_TOKENS)

    def end(self) -> str:
        """Return the text of the tokens that have waited for the rest of a character."""
        return self._take(len(self._ids))

    def _take(self, stop: int) -> str:
        if stop <= self._read:
            return ""
        before, text = self._decode(0, self._read), self._decode(0, stop)
        # With byte fallback, a byte that is no text makes those before it none, too.
        continued = text.startswith(before)
        text = text[len(before) :] if continued else self._decode(self._read, stop)
        if text:
            # From now on, only the tokens of this text: decoding all would take quadratic time.
            self._ids, self._read = self._ids[self._read :], stop - self._read
        return text

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=False)
        return text


class Continuation:
    """The continuation of a prompt, which grows with every token until it ends.

    It ends before any of the stop tokens and stop texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        stop_tokens: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        *,
        show_special: bool = False,
    ) -> None:
        """Start without tokens; `TokenDecoder` describes `show_special`."""
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        """Tokens without the stop token."""
        self.content = ""
        self.finish_reason: Literal["stop", "length", "interrupted"] = "interrupted"
        self._decoder = TokenDecoder(tokenizer, prompt_ids, show_special=show_special)
        self._stop_tokens, self._stop_texts = stop_tokens, stop_texts
        self._held = ""  # its end may turn out to be the start of a stop text

    @property
    def stopped(self) -> bool:
        """True after a stop token or a stop text: further tokens do not belong to it."""
        return self.finish_reason == "stop"

    def add(self, token: int) -> str:
        """Return the text that a token completes, without a stop text; "" after the end."""
        if self.stopped:
            return ""
        if token in self._stop_tokens:
            self.finish_reason = "stop"
            return self._rest()
        self.ids.append(token)
        return self._extend(self._decoder.add(token))

    def end(self) -> str:
        """Return the rest of the text, after the last token of a continuation without a stop."""
        if self.stopped:
            return ""
        self.finish_reason = "length"
        return self._rest()

    def stream(self, tokens: Generator[int]) -> Generator[str]:
        """Yield the text of `tokens` as they come; no more are asked for after the end."""
        with closing(tokens):
            for token in tokens:
                yield self.add(token)
                if self.stopped:
                    return
        yield self.end()

    def _rest(self) -> str:
        text = self._extend(self._decoder.end())
        rest, self._held = self._held, ""
        self.content += rest
        return text + rest

    def _extend(self, text: str) -> str:
        self._held += text
        ends = [self._held.index(stop) for stop in self._stop_texts if stop in self._held]
        if ends:
            self.finish_reason = "stop"
            text, self._held = self._held[: min(ends)], ""
        else:
            ready = len(self._held) - _start_of_stop(self._held, self._stop_texts)
            text, self._held = self._held[:ready], self._held[ready:]
        self.content += text
        return text


def _start_of_stop(text: str, stop_texts: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a stop text begins with."""
    return max(
        (n for stop in stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )
