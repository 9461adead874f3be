"""Spans of the answers in a rendered conversation, by tracing the loops of its template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dtt.data.conversations.rows import (
    REASONING_END,
    Conversation,
    Message,
    RefusedRow,
    common_length,
)
from dtt.data.conversations.sandbox import MESSAGE_END
from dtt.data.conversations.template import ChatTemplate, Events

VERSION = 1
"""Version of the masks. Token files of another version are created again."""

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


class MaskMethod(StrEnum):
    """The method that found the span of an answer."""

    TRACED = "traced"
    PREFIX = "prefix"
    OMITTED = "omitted"
    """The template renders nothing of the answer, so it is not a target. For example, it ignores
    tool calls, or contents that are strings."""


TRACED = MaskMethod.TRACED


@dataclass(frozen=True)
class AnswerSpan:
    """The text of one answer in a rendered conversation."""

    message: int
    """Index of the message."""
    start: int
    """First character after the header, which the generation prompt supplies at inference."""
    end: int
    """End of the text that the template renders for the message."""
    method: MaskMethod


@dataclass
class TracedRender:
    """A render, and the positions of the messages in it."""

    text: str
    messages: dict[int, list[Span]]
    """Spans by the index of the message, without those that are empty or white space."""
    nested: list[tuple[int, int, Span]]
    """Messages rendered inside of another: the outer, the inner, the span of the inner."""


def parse_events(text: str, events: Events) -> TracedRender | None:
    """Return the parts of a text by the events of its render, or None if they are not balanced."""
    found = TracedRender(text, {}, [])
    opened: list[tuple[int, int]] = []
    for event, place in events:
        if event != MESSAGE_END:
            opened.append((event, place))
            continue
        if not opened:
            return None
        index, start = opened.pop()
        span = text[start:place]
        if not span or span.isspace():
            continue
        outer = opened[-1][0] if opened else None
        if outer is None or outer == index:
            found.messages.setdefault(index, []).append((start, place))
        else:
            found.nested.append((outer, index, (start, place)))
    return None if opened else found


class LossMask:
    """The derivation of loss masks for one chat template."""

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str]) -> None:
        """Create it for a template and the strings of the tokenizer's special tokens."""
        self._template = template
        self._special = tuple(special_tokens)
        self._generation_prompts: dict[Any, str | None] = {}

    def answers(
        self,
        conversation: Conversation,
        text: str,
        trace: TracedRender | None,
        indices: Iterable[int],
    ) -> list[AnswerSpan]:
        """Return the spans of the answers with the given indices in the text of a conversation.

        `text` and `trace` come from `traced`. Raises RefusedRow if an answer cannot be located with
        certainty.
        """
        prompts: dict[str, str | None] = {}
        found = []
        for index in indices:
            # The surer method first.
            span = None if trace is None else _own_span(trace, index)
            answer = None
            if trace is not None and span is not None:
                answer = self._traced(conversation, text, span, index, prompts)
                hidden = _hidden_turns(conversation, trace, index)
                if (
                    answer is not None
                    and hidden
                    and self._shows(conversation, hidden, answer, text)
                ):
                    answer = self._cut(conversation, text, answer)
            # Two more renders, so it comes last.
            answer = answer or self._by_prefix(conversation, text, index)
            if self._is_omitted(conversation.messages[index], text[answer.start : answer.end]):
                answer = AnswerSpan(index, answer.start, answer.start, MaskMethod.OMITTED)
            found.append(answer)
        return found

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

    def _traced(
        self,
        conversation: Conversation,
        text: str,
        span: Span,
        index: int,
        prompts: dict[str, str | None],
    ) -> AnswerSpan | None:
        """Return the answer in the span of a message, without its header."""
        start, end = span
        usual = self._generation_prompt(conversation, "user")
        if (
            usual
            and self._template.ends_with_prompt
            and text.startswith(usual, start)
            and text.find(usual, start + 1, end) == -1
        ):
            # The prompt of this answer ends with `usual`. If a longer suffix of it were the start
            # of the span, the span would contain `usual` twice. So no render is needed.
            return AnswerSpan(index, start + len(usual), end, TRACED)
        before = conversation.messages[index - 1]["role"] if index else ""
        if before not in prompts:
            # Turns after the same role have equivalent prompts for this purpose.
            prompt = self._render(conversation.until(index), True) if index else None
            prompts[before] = prompt
        expected = self._generation_prompt(conversation, before)
        if expected is None:
            expected = usual
        # Without the generation prompt, the start of the answer is unknown.
        if usual is None or expected is None:
            return None
        header = header_length(prompts[before], expected, usual, text[start:end])
        joins = usual.startswith(self._special) and not text.startswith(self._special, start)
        if header is None and before == "assistant" and joins:
            # Templates that join answers write no header, which would begin with a special token.
            header = 0
        return None if header is None else AnswerSpan(index, start + header, end, TRACED)

    def _shows(
        self, conversation: Conversation, hidden: list[int], answer: AnswerSpan, text: str
    ) -> bool:
        """Return True if the text of an answer changes with the content of other turns."""
        messages = list(conversation.messages)
        for i in hidden:
            messages[i] = {**messages[i], "content": "a different text"}
        try:
            _, other = self.traced(replace(conversation, messages=tuple(messages)))
        except RefusedRow:
            other = None
        span = None if other is None else _own_span(other, answer.message)
        if other is None or span is None:
            # Without proof that the turns are separate, they count as mixed.
            return True
        return not other.text[span[0] : span[1]].endswith(text[answer.start : answer.end])

    def traced(
        self, conversation: Conversation, prompt: bool = False
    ) -> tuple[str, TracedRender | None]:
        """Return the text of a conversation, and the messages in it as far as they are known.

        Raises RefusedRow if the template refuses the conversation.
        """
        text, events = self._template.render_traced(conversation, prompt)
        return text, None if events is None else parse_events(text, events)

    def _cut(self, conversation: Conversation, text: str, answer: AnswerSpan) -> AnswerSpan:
        """Return an answer without the tool results that the template renders after it.

        The answer ends where the render of the turns up to it ends.
        """
        until = self._render(conversation.until(answer.message + 1), False)
        if until is None or not text.startswith(until) or len(until) <= answer.start:
            raise self._refused(answer.message)
        return replace(answer, end=min(answer.end, len(until)))

    def _by_prefix(self, conversation: Conversation, text: str, index: int) -> AnswerSpan:
        """Return the answer between the render of the prompt and that of the turns up to it."""
        prompt = self._render(conversation.until(index), True) if index else None
        whole = self._render(conversation.until(index + 1), False)
        if (
            prompt is None
            or whole is None
            or len(whole) <= len(prompt)
            # Both renders must continue each other: a template that rewrites earlier turns has no
            # prefix.
            or not whole.startswith(prompt)
            or not text.startswith(whole)
        ):
            raise self._refused(index)
        return AnswerSpan(index, len(prompt), len(whole), MaskMethod.PREFIX)

    def _refused(self, index: int) -> RefusedRow:
        return RefusedRow(
            f"messages[{index}]: the tokens of this answer cannot be derived from the chat template"
        )

    def _generation_prompt(self, conversation: Conversation, before: str) -> str | None:
        """Return the text that the generation prompt adds after a message of the role `before`.

        It comes from a separate conversation with the same variables.
        """
        # The same for all conversations with these variables: rendered once, not per row.
        key = (before, repr(conversation.template_kwargs), conversation.tools is None)
        if key not in self._generation_prompts:
            messages = PROBES.get(before, PROBES["user"])
            self._generation_prompts[key] = None
            for form in (messages, with_parts(messages)):  # some templates read only one form
                probe = Conversation(form, conversation.tools, conversation.template_kwargs)
                with_prompt, without = self._render(probe, True), self._render(probe, False)
                if with_prompt is not None and without is not None:
                    self._generation_prompts[key] = self._added(probe, with_prompt, without)
                    break
        return self._generation_prompts[key]

    def _added(self, probe: Conversation, with_prompt: str, without: str) -> str | None:
        """Return the text that the generation prompt adds to a conversation; None if unclear."""
        if with_prompt.startswith(without):
            return with_prompt[len(without) :]
        # Without it, the template ends conversations differently: take the text after the last
        # message.
        _, trace = self.traced(probe, True)
        span = None if trace is None else _own_span(trace, len(probe.messages) - 1)
        return None if span is None else with_prompt[span[1] :]

    def _render(self, conversation: Conversation, prompt: bool) -> str | None:
        try:
            return self._template.render(conversation, prompt)
        except RefusedRow:
            return None


def _own_span(trace: TracedRender, index: int) -> Span | None:
    """Return the span of a message if there is just one, without another message inside."""
    spans = trace.messages.get(index, ())
    if len(spans) != 1 or any(index in (outer, inner) for outer, inner, _ in trace.nested):
        # Two spans mean that the template prints the message twice, and neither is the answer for
        # certain.
        return None
    return spans[0]


def _hidden_turns(conversation: Conversation, trace: TracedRender, index: int) -> list[int]:
    """Return the turns up to the next answer that have no span, and so may be in this answer's."""
    hidden = []
    for i in range(index + 1, len(conversation.messages)):
        role = conversation.messages[i]["role"]
        if role == "assistant":
            break
        if role in ("user", "tool") and i not in trace.messages:
            hidden.append(i)
    return hidden


_USER = {"role": "user", "content": "How warm is it?"}
_CALL = {"type": "function", "function": {"name": "thermometer", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
PROBES: dict[str, tuple[dict[str, Any], ...]] = {
    "user": (_USER,),
    "tool": (_USER, _CALLING, {"role": "tool", "name": "thermometer", "content": "20 degrees"}),
    "assistant": (_USER, {"role": "assistant", "content": "One moment."}),
}
"""Conversations whose last message has a role, by that role."""


def with_parts(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages whose contents are lists with one part."""
    return tuple(
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    )


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


def header_length(prompt: str | None, expected: str, usual: str, span: str) -> int | None:
    """Return the length of the header of an answer, which is not trained, or None if unknown.

    `prompt` is the render of the turns before the answer with the generation prompt. `expected` is
    the text that the generation prompt adds after a turn of the same role, `usual` the text that it
    adds after a turn of the user. `span` is the text of the answer with its header.

    The header is the longest suffix of the prompt with which the span begins. Where the generation
    prompt also begins the answer, for example with `<think>`, and the template renders this answer
    without it, the header is their common prefix, up to the last line feed or `>`.
    """
    overlap = suffix_overlap(prompt, span) if prompt is not None else 0
    if span.startswith(usual):
        # Some templates write a header that their generation prompt lacks after tool results.
        return max(overlap, len(usual)) or (None if prompt is None else 0)
    if overlap and overlap >= len(expected):
        return overlap
    if not expected and prompt is not None:
        return 0
    common = common_length(expected, span)
    cut = max(expected.rfind(sign, 0, common) for sign in ("\n", ">"))
    return cut + 1 or None


def suffix_overlap(prompt: str, span: str) -> int:
    """Return the length of the longest suffix of `prompt` with which `span` begins."""
    tail = prompt[-len(span) :] if span else ""
    # Eight characters are found by C code; a comparison at every position would be slow.
    begin = span[:8]
    at = tail.find(begin)
    while at != -1:
        if span.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(begin, at + 1)
    return next((n for n in range(min(7, len(span)), 0, -1) if tail.endswith(span[:n])), 0)
