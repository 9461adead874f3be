"""Spans of the answers in a rendered conversation, from renders of its first turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dtt.data.conversations.rows import (
    REASONING_END,
    Conversation,
    Message,
    RefusedRow,
    common_length,
)
from dtt.data.conversations.template import ChatTemplate

VERSION = 1
"""Version of the masks. Token files of another version are created again."""


@dataclass(frozen=True)
class AnswerSpan:
    """The text of one answer in a rendered conversation."""

    message: int
    """Index of the message."""
    start: int
    """First character after the header, which the generation prompt supplies at inference."""
    end: int
    """End of the text that the template renders for the message."""

    @property
    def is_omitted(self) -> bool:
        """True if the template renders nothing of the answer, so it is not a target.

        For example, it ignores tool calls, or contents that are strings.
        """
        return self.start == self.end


class LossMask:
    """The derivation of loss masks for one chat template."""

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str]) -> None:
        """Create it for a template and the strings of the tokenizer's special tokens."""
        self._template = template
        self._special = tuple(special_tokens)
        self._frames: dict[tuple[str, bool], tuple[str, str]] = {}

    def answers(
        self, conversation: Conversation, text: str, indices: Iterable[int]
    ) -> list[AnswerSpan]:
        """Return the spans of the messages with the given indices in the text of a conversation.

        `indices` ascend. Raises RefusedRow if one cannot be located with certainty. To follow the
        loop of a template instead would save a render per answer but the last: of conversations
        of ten answers, three quarters of the time. But the position in the loop shows neither what
        a macro writes, nor where a header ends, nor that the text changes with later turns.
        """
        found: list[AnswerSpan] = []
        ends: dict[int | None, int] = {None: 0}  # end of each answer that was located
        for index in indices:
            start, end = self._span(conversation, text, index, ends)
            ends[index] = end
            is_omitted = self._is_omitted(conversation.messages[index], text[start:end])
            found.append(AnswerSpan(index, start, start if is_omitted else end))
        return found

    def _span(
        self, conversation: Conversation, text: str, index: int, ends: Mapping[int | None, int]
    ) -> tuple[int, int]:
        """Return the part of a text between the prompt of a message and the turns after it.

        `ends` are the ends of earlier answers, and 0 for None, as there is none before the first.
        """
        usual, closing = self._frame(conversation)
        is_last = index == len(conversation.messages) - 1
        whole = text if is_last else self._render(conversation.until(index + 1), prompt=False)
        whole = whole and whole.removesuffix(closing)
        # The text of the turns up to this one may not change with those after it: else the model
        # would see another text at inference, where there are none yet.
        if whole is None or not text.startswith(whole):
            raise RefusedRow(
                f"messages[{index}]: the chat template renders this answer, or a turn before it, "
                "differently once there are more turns: chat.turns=expand makes each answer the "
                "last of a sample of its own"
            )
        roles = [message["role"] for message in conversation.messages[: index + 1]]
        earlier = [i for i, role in enumerate(roles[:-1]) if role == "assistant"]
        after = ends.get(earlier[-1] if earlier else None)
        is_reply = bool(usual) and roles[-2:] == ["user", "assistant"]
        # Between two answers, there is one place where the prompt of a question can end, unless a
        # message contains its text: so no render is needed, which halves the time.
        if is_reply and after is not None and whole.count(usual, after) == 1:
            return whole.index(usual, after) + len(usual), len(whole)
        refused = RefusedRow(
            f"messages[{index}]: the tokens of this answer cannot be derived from the chat template"
        )
        prompt = self._render(conversation.until(index), prompt=True)
        if prompt is None:
            raise refused
        start = len(prompt)
        if whole.startswith(prompt):
            # Some templates write a header that their generation prompt lacks after tool results.
            lacks = not prompt.endswith(usual) and whole.startswith(usual, start)
            return start + lacks * len(usual), len(whole)
        # Where the generation prompt also begins the answer, for example with `<think>`, and the
        # template renders this answer without it, the header is what both begin with, up to the
        # last line feed or `>`.
        before = self._render(conversation.until(index), prompt=False)
        before = before and before.removesuffix(closing)
        if before is None or not whole.startswith(before):
            raise refused
        common = common_length(prompt, whole)
        cut = max(prompt.rfind(sign, len(before), common) for sign in ("\n", ">"))
        if cut < 0:
            raise refused
        return cut + 1, len(whole)

    def _frame(self, conversation: Conversation) -> tuple[str, str]:
        """Return what the generation prompt adds after a question, and the token that ends a text.

        Phi 3, for example, writes its end-of-text token after the last turn, whoever speaks there.
        """
        # The same for all conversations with these variables: rendered once, not per row.
        key = (repr(conversation.template_kwargs), conversation.tools is None)
        if key not in self._frames:
            self._frames[key] = "", ""
            for content in ("Hi", [{"type": "text", "text": "Hi"}]):  # some read only one form
                messages = ({"role": "user", "content": content},)
                probe = replace(conversation, messages=messages)
                opened = self._render(probe, prompt=True)
                closed = self._render(probe, prompt=False)
                if opened is None or closed is None:
                    continue
                endings = ("", *(token for token in self._special if closed.endswith(token)))
                for closing in endings:
                    body = closed.removesuffix(closing)
                    if opened.startswith(body):
                        self._frames[key] = opened[len(body) :], closing
                        return self._frames[key]
        return self._frames[key]

    def _is_omitted(self, message: Message, rendered: str) -> bool:
        """Return True if the rendered text of a message contains only special tokens.

        As a target, it would teach the model to end its answer at once.
        """
        has_text = any(message.get(key) for key in ("content", "tool_calls", "reasoning_content"))
        rendered = rendered.strip()
        # An empty answer in the data is a target as it is.
        if not has_text or (rendered and not rendered.startswith(self._special)):
            return False
        content = message.get("content")
        if isinstance(content, str) and content.strip() and content.strip() in rendered:
            return False  # an answer that consists of the strings of special tokens
        for token in self._special:
            rendered = rendered.replace(token, "")
        return not rendered.strip()

    def _render(self, conversation: Conversation, *, prompt: bool) -> str | None:
        try:
            return self._template.render(conversation, prompt)
        except RefusedRow:
            return None


def check_reasoning(conversation: Conversation, answer: AnswerSpan, rendered: str) -> None:
    """Raise RefusedRow if a template adds a reasoning to that in the content of an answer.

    Or if it leaves out that of the last answer. Of earlier answers, many do so on purpose.
    """
    content = conversation.messages[answer.message].get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    given = sum(len(REASONING_END.findall(text)) for text in texts)
    found = len(REASONING_END.findall(rendered))
    if given and found > given:
        raise RefusedRow(
            f"messages[{answer.message}]: the chat template writes another reasoning before the "
            "one in the content: move that to reasoning_content"
        )
    if found < given and answer.message == len(conversation.messages) - 1:
        raise RefusedRow(
            f"messages[{answer.message}]: the chat template leaves out the reasoning in the content"
        )
