"""The formats of rows that other tools write, and the keys that dtt reads in each.

| format | keys | from |
| --- | --- | --- |
| messages | `messages`; `tools`; `loss_mask`, one flag per message | OpenAI, TRL, LLaMA-Factory |
| completion | `prompt`, `completion`: text or messages | TRL |
| ShareGPT | `conversations` of `from` and `value`; `tools` as JSON text | axolotl, LLaMA-Factory |
| alpaca, dolly | PARTS, `output` or `response`; `history` | alpaca, LLaMA-Factory |
| pairs | `chosen`, `rejected`; the question under any name of QUESTIONS | TRL, LLaMA-Factory |

All may have `system` or `system_prompt`, and variables of the template in
`template_kwargs` or `chat_template_kwargs`. A key is read, refused because ignoring it would change
what is trained (REFUSED, TEXTS), or reported as not used, with the number of rows that have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dtt.data.conversations.rows import (
    Conversation,
    Message,
    RefusedRow,
    check_depth,
    common_length,
    is_object,
    json_of,
    list_of,
    make_conversation,
    object_of,
    shown,
    wrong_kind,
)

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""Roles by the names that ShareGPT rows use in `from`."""
SYSTEM = ("system", "system_prompt")
"""Keys of a row's system message."""
PARTS = ("instruction", "input", "context")
"""Keys of the parts of one question, in their order: alpaca's, and dolly's with a passage."""
TEXTS = (
    *("messages", "conversations", "segments", "prompt", "instruction", "input", "question"),
    *("query", "completion", "output", "response", "history", "system", "system_prompt"),
    *("context", "contexts", "passage", "passages", "document", "documents", "paragraph"),
    *("paragraphs", "article", "background", "knowledge", "evidence"),
)
"""Keys of the text of a conversation in the formats of datasets.

Others, such as `source` and `category`, describe a row. A row may repeat a part of its conversation
under one of these keys, as UltraChat does with the first question. Any other text would be lost,
and a model that learns answers without the passage they are taken from learns to invent them.
"""
REPEATED = 20
"""Minimum characters of a text that counts as repeated if it is a part of a message."""
QUESTIONS = ("prompt", "messages", "conversations", "question", "instruction", "query", "input")
"""Keys of the question of a preference pair, in order of preference."""
PICTURES = "the row has {key}, and dtt trains on text"
RENDERED = "{key} is rendered text (axolotl's input_output): write messages"
TOKENIZED = "the row is tokenized already: {key}; dtt reads ids from token files, data.type=tokens"
KTO = "{key} marks good and bad answers (KTO), which dtt does not train"


def _is_truth(value: object) -> bool:
    text = value.lower() if isinstance(value, str) else value
    return text in ("true", "false", False, True)


def _is_filled(value: object) -> bool:
    return value not in ([], {}, "", False)


REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    # Training on the answers that people rejected would teach exactly these.
    "label": (_is_truth, KTO),
    "kto_tag": (_is_truth, KTO),
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"), (_is_filled, PICTURES)
    ),
    "functions": (_is_filled, "{key} is the old form of tools: write tools"),
    "function_call": (_is_filled, "{key} is the old form of tool calls: write tool_calls"),
    "segments": (_is_filled, RENDERED),
    "input_ids": (_is_filled, TOKENIZED),
    "labels": (lambda value: isinstance(value, list), TOKENIZED),
}
"""Keys of a row that are refused if they have such a value, with the reason."""


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same prompt and a preferred and a dispreferred answer."""

    chosen: Conversation
    rejected: Conversation


class _Row:
    """A row without nulls that remembers which keys were read."""

    def __init__(self, row: object) -> None:
        values = object_of(row, "the row")
        check_depth(row)
        self._values = {key: value for key, value in values.items() if value is not None}
        self._read: set[str] = set()
        for key in [key for key in REFUSED if key in self._values]:
            is_meant, why = REFUSED[key]
            if is_meant(self._values[key]):
                raise RefusedRow(why.format(key=key))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def read(self, key: str) -> Any:
        """Return a value, None if it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def one_of(self, *keys: str) -> Any:
        """Return the value of the only key of `keys` that is present; None without any."""
        given = [key for key in keys if self.read(key) not in (None, "")]
        if len({json.dumps(self._values[key], sort_keys=True, default=str) for key in given}) > 1:
            raise RefusedRow(f"{' and '.join(given)} contradict each other")
        return self._values[given[0]] if given else None

    def unread(self, *conversations: Conversation) -> tuple[str, ...]:
        """Return the keys that were not read, without those that repeat a part of the row.

        Raises RefusedRow if one of TEXTS has other text than the conversations of the row.
        """
        unread = [key for key in self._values if key not in self._read]
        texts = {key: [*_strings(self._values[key])] for key in unread if key in TEXTS}
        texts = {key: strings for key, strings in texts.items() if strings}
        if texts:
            known = {*_strings([one.messages for one in conversations])}
            for key, strings in texts.items():
                if not all(
                    text in known
                    or (len(text) >= REPEATED and any(text in other for other in known))
                    for text in strings
                ):
                    raise RefusedRow(
                        f"{key} is not part of the conversation and would be lost: write it into "
                        "a message, or remove the key"
                    )
        return tuple(key for key in unread if key not in texts)


def _strings(value: object) -> Iterator[str]:
    """Yield the texts in a value, without the names of roles."""
    if isinstance(value, str):
        if text := value.strip():
            yield text
    elif is_object(value):
        for key, item in value.items():
            if key not in ("role", "from", "type"):
                yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def parse_row(row: object) -> Conversation:
    """Return the conversation in a row, a decoded JSON object, with at least one answer.

    Raises RefusedRow with the reason.
    """
    value = _Row(row)
    conversation = _conversation(value, *_messages_of(value))
    if all(message["role"] != "assistant" for message in conversation.messages):
        raise RefusedRow("no message has the role assistant, so there is nothing to train on")
    return conversation


def parse_prompt(row: object) -> Conversation:
    """Return the conversation in a row like `parse_row`, which need not contain an answer."""
    value = _Row(row)
    if "prompt" in value and "completion" not in value:
        return _conversation(value, _side(value.read("prompt"), "prompt", "user"), 0)
    return _conversation(value, *_messages_of(value))


def parse_pair(row: object) -> PreferencePair:
    """Return the preferred and the dispreferred conversation in a row.

    `chosen` and `rejected` are strings, messages or lists of messages. The question, a string or a
    list of messages, precedes both; without it, it is their longest common prefix. Only the
    messages after the question are trained. Raises RefusedRow with the reason.
    """
    value = _Row(row)
    for key in ("chosen", "rejected"):
        if key not in value:
            raise RefusedRow(f"{key} is missing from a preference row")
    sides = [_side(value.read(key), key, "assistant") for key in ("chosen", "rejected")]
    prompt = _question(value, sides)
    system = _system(value, [*prompt, *sides[0]])
    if prompt:
        common = len(prompt)
        sides = [side if side[:common] == prompt else [*prompt, *side] for side in sides]
    else:
        common = common_length(*sides)
    tools, kwargs = _variables(value)
    pair = [
        make_conversation([*system, *side], len(system) + common, tools, kwargs) for side in sides
    ]
    for key, side in zip(("chosen", "rejected"), pair, strict=True):
        if all(message["role"] != "assistant" for message in side.messages[len(system) + common :]):
            raise RefusedRow(f"{key} has no message with the role assistant after the prompt")
    chosen, rejected = pair
    return PreferencePair(replace(chosen, unread=value.unread(*pair)), rejected)


def _question(row: _Row, sides: list[list[Any]]) -> list[Any]:
    """Return the messages before both answers of a pair; none if the answers contain them.

    TRL's own sets repeat the chosen conversation in `messages`. Any other text that stands where a
    question does must not be lost: a model would be tuned on answers without their questions.
    """
    texts = {key: row.read(key) for key in QUESTIONS}
    given = {key: _side(text, key, "user") for key, text in texts.items() if text}
    given = {key: messages for key, messages in given.items() if messages not in sides}
    if "instruction" in given and ("input" in given or isinstance(texts["instruction"], str)):
        given["instruction"] = [{"role": "user", "content": _joined_parts(row)}]
        given.pop("input", None)
    if len({json.dumps(value, sort_keys=True, default=str) for value in given.values()}) > 1:
        # `prompt` may be the last question of a conversation that stands in another key as well.
        longest = max(given.values(), key=len)
        if any(value[-1:] != longest[-1:] for value in given.values()):
            raise RefusedRow(f"{' and '.join(given)} are different questions")
        return longest
    prompt = next(iter(given.values()), [])
    # Complete conversations on both sides contain the question.
    return [] if prompt and all(side[:-1][-len(prompt) :] == prompt for side in sides) else prompt


def _messages_of(row: _Row) -> tuple[list[Any], int]:
    """Return the messages of a row and the index of the first that may be trained."""
    if "messages" in row:
        return _with_flags(row, _turns(row.read("messages"), "messages")), 0
    if "prompt" in row and "completion" in row:
        prompt = _side(row.read("prompt"), "prompt", "user")
        answer = _side(row.read("completion"), "completion", "assistant")
        return [*prompt, *answer], len(prompt)
    if "conversations" in row:
        return _with_flags(row, _turns(row.read("conversations"), "conversations")), 0
    if "instruction" in row and ("output" in row or "response" in row):
        return _from_instruction(row), 0
    keys = ", ".join(sorted(map(str, row))[:10]) or "none"
    raise RefusedRow(
        "no messages: the row needs messages, prompt and completion, conversations, or "
        f"instruction and output; its keys: {keys}"
    )


def _with_flags(row: _Row, messages: list[Any]) -> list[Any]:
    """Return the messages with the flags of LLaMA-Factory's `loss_mask`, one per message."""
    if "loss_mask" not in row:
        return messages
    flags = list_of(row.read("loss_mask"), "loss_mask")
    if len(flags) != len(messages):
        raise RefusedRow(f"loss_mask has {len(flags)} values for {len(messages)} messages")
    return [
        {**message, "loss_mask": flag} if is_object(message) else message
        for message, flag in zip(messages, flags, strict=True)
    ]


def _side(value: Any, key: str, role: str) -> list[Any]:
    """Return the messages of a question or an answer, which may be a string or one message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _turns([value] if is_object(value) else value, key)


def _turns(value: object, key: str) -> list[Any]:
    """Return messages, converted from ShareGPT's turns where they are such."""
    turns = list_of(value, key)
    return [
        _from_sharegpt(turn, f"{key}[{i}]") if is_object(turn) and "role" not in turn else turn
        for i, turn in enumerate(turns)
    ]


def _from_sharegpt(turn: dict[str, Any], where: str) -> Message:
    turn = dict(turn)
    speaker = turn.pop("from", None)
    if speaker is None and "value" not in turn:
        raise RefusedRow(f"{where}.role is missing")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise RefusedRow(
            f"{where}.from: unknown role {shown(speaker)}; "
            f"expected one of {', '.join(SHAREGPT_ROLES)}"
        )
    text = turn.pop("value", None)
    message: Message = {"role": SHAREGPT_ROLES[speaker], **turn}
    if speaker != "function_call":
        return message | {"content": text}
    # As text, the call would be trained in a form that no template renders at inference.
    calls = json_of(text) if isinstance(text, str) else text
    if calls is None:
        raise RefusedRow(f"{where}.value: a function call that is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"tool_calls": [{"type": "function", "function": call} for call in calls]}


def _from_instruction(row: _Row) -> list[Message]:
    """Return a question and its answer, after earlier ones (LLaMA-Factory's `history`)."""
    answer = row.one_of("output", "response")
    if not isinstance(answer, str | None):
        raise wrong_kind(answer, "output", "a string")
    turns = []
    for i, turn in enumerate(list_of(row.read("history") or [], "history")):
        if not (
            isinstance(turn, list) and len(turn) == 2 and all(isinstance(t, str) for t in turn)
        ):
            raise RefusedRow(f"history[{i}]: expected a question and an answer")
        turns.append(turn)
    messages: list[Message] = []
    for question, reply in [*turns, (_joined_parts(row), answer or "")]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return messages


def _joined_parts(row: _Row) -> str:
    """Return the question whose parts are under the keys of PARTS."""
    texts = {key: row.read(key) or "" for key in PARTS}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise wrong_kind(text, key, "a string")
    return "\n\n".join(text for text in texts.values() if text)


def _conversation(row: _Row, messages: list[Any], answers_from: int) -> Conversation:
    if "loss_mask" in row and not ("messages" in row or "conversations" in row):
        raise RefusedRow("loss_mask is read beside messages or conversations only")
    system = _system(row, messages)
    tools, kwargs = _variables(row)
    first = answers_from + len(system) if answers_from else 0
    conversation = make_conversation([*system, *messages], first, tools, kwargs)
    return replace(conversation, unread=row.unread(conversation))


def _system(row: _Row, messages: list[Any]) -> list[Message]:
    """Return the row's own system message, if it has one that `messages` lack."""
    text = row.one_of(*SYSTEM)
    if text is None:
        return []
    if not isinstance(text, str):
        raise wrong_kind(text, "system", "a string")
    first = messages[0] if messages and is_object(messages[0]) else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}]
    if first.get("content") != text:
        raise RefusedRow("system and the system message of the conversation are different")
    return []


def _variables(row: _Row) -> tuple[Any, Any]:
    """Return the tools and the variables of the template."""
    return row.read("tools"), row.one_of("template_kwargs", "chat_template_kwargs")
