"""Conversations in rows: their validation, and the reasons to refuse them.

`dialects` recognises the formats of rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of every template, which a row's `template_kwargs` cannot set."""
TRAIN_FLAGS = {
    "train": True,  # axolotl; the name that dtt documents
    "training": True,  # axolotl
    "weight": True,  # OpenAI and Mistral: 0 or 1
    "trainable": True,  # verl
    "loss_mask": True,  # verl
    "loss": True,  # ms-swift
    "masked": False,  # torchtune
}
"""Keys of a message that exclude it from the targets or not, with the value that trains it.

A model that learns what its author excluded unlearns what it should keep, without any sign of it
during training (fw-ai/cookbook#387: `weight: 0` was lost on the way).
"""
REASONING = ("reasoning_content", "thinking", "reasoning", "thoughts")
"""Keys of a message's reasoning. Templates of different models read different ones."""
REASONING_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]")
"""End of a reasoning in the content of an answer."""
REFUSED_KEYS = {
    "train_detail": "trains parts of a message, which dtt cannot",
    "training_detail": "trains parts of a message, which dtt cannot",
    "function_call": "is the old form of tool_calls: write tool_calls",
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"),
        "is not text, and dtt trains on text",
    ),
}
"""Keys of a message that dtt refuses if they have a value, with the reason."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a row, and in JSON text in it."""
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"
"""The reason for a refusal."""


class RefusedRow(ValueError):
    """A row that cannot become a training sample, with the reason."""

    def __init__(self, why: str) -> None:
        """Store the reason, which names the message and the key."""
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Conversation:
    """A validated conversation.

    Messages have the keys of the OpenAI format without those whose value is null. `train` is not
    among them: it is in `trained`.
    """

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    trained: tuple[bool, ...] = ()
    """One flag per message: False excludes its tokens from the targets."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the row that dtt does not use."""

    def until(self, end: int) -> Conversation:
        """Return the conversation of the first `end` messages."""
        return Conversation(
            self.messages[:end], self.tools, self.template_kwargs, self.trained[:end]
        )


def check_depth(value: object) -> None:
    """Raise RefusedRow if lists and objects are nested too deep, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise RefusedRow(TOO_DEEP)


def json_of(text: str) -> Any:
    """Return the value of JSON text in a row, None if it is none; RefusedRow if it is too deep.

    A value that has come through would be walked by recursion, whose limit is that of the process:
    libraries raise it, and the same row would be used in one run and not in another.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return None
    except RecursionError:
        raise RefusedRow(TOO_DEEP) from None
    check_depth(value)
    return value


def make_conversation(
    messages: list[Any],
    answers_from: int = 0,
    tools: object = None,
    template_kwargs: object = None,
) -> Conversation:
    """Return the checked conversation; raise RefusedRow with the message and the key.

    Answers before message `answers_from` are not trained.
    """
    if not messages:
        raise RefusedRow("messages is empty")
    parsed, trained = [], []
    for i, message in enumerate(messages):
        clean, train = _message(message, f"messages[{i}]")
        parsed.append(clean)
        trained.append(train and i >= answers_from)
    kwargs = {} if template_kwargs is None else template_kwargs
    if not is_object(kwargs):
        raise wrong_kind(kwargs, "template_kwargs", "an object")
    if reserved := sorted(RESERVED & kwargs.keys()):
        raise RefusedRow(f"template_kwargs.{reserved[0]}: this variable cannot be set")
    return Conversation(tuple(parsed), _tools(tools), kwargs, tuple(trained))


def _message(message: object, where: str) -> tuple[Message, bool]:
    """Return a checked message without nulls and flags, and True if it may be trained."""
    clean = {k: value for k, value in object_of(message, where).items() if value is not None}
    for key in [key for key in REFUSED_KEYS if key in clean]:
        if clean.pop(key) not in ([], {}, ""):
            raise RefusedRow(f"{where}.{key} {REFUSED_KEYS[key]}")
    train = _is_trained(clean, where)
    role = clean.get("role")
    if role is None:
        raise RefusedRow(f"{where}.role is missing")
    if not isinstance(role, str) or role not in ROLES:
        raise RefusedRow(
            f"{where}.role: unknown role {shown(role)}; expected one of {', '.join(sorted(ROLES))}"
        )
    for key in [key for key in CHECKS if key in clean]:
        CHECKS[key](clean[key], f"{where}.{key}")
    if "tool_calls" in clean:
        if role != "assistant":
            raise RefusedRow(f"{where}.tool_calls: only the assistant can call tools, not {role}")
        clean["tool_calls"] = [*map(_with_object, clean["tool_calls"])]
    if role == "assistant" and isinstance(clean.get("content"), str):
        clean["content"] = _with_beginning(clean["content"])
    texts = {clean[key] for key in REASONING if key in clean}
    if len(texts) > 1:
        raise RefusedRow(f"{where} has different texts of reasoning under several keys")
    # Tool calls or reasoning are an answer without content.
    answers = role == "assistant" and any(clean.get(key) for key in ("tool_calls", *REASONING))
    if "content" not in clean and not answers:
        raise RefusedRow(f"{where}.content is missing")
    return clean, train


def _with_beginning(content: str) -> str:
    """Return an answer with the beginning of its reasoning.

    Where the prompt opens the reasoning, as DeepSeek-R1's does, the answers of a model hold only
    its end. A template recognises both or neither, and would write a second, empty reasoning.
    """
    end = REASONING_END.search(content)
    if end is None or (begin := end.group().replace("/", "")) in content[: end.start()]:
        return content
    return f"{begin}{content}" if content.startswith("\n") else f"{begin}\n{content}"


def _is_trained(message: Message, where: str) -> bool:
    """Remove the flags of TRAIN_FLAGS from a message; return what they say, True without any."""
    said: dict[str, bool] = {}
    for key in [key for key in TRAIN_FLAGS if key in message]:
        value = message.pop(key)
        # 0 == False and 1.0 == True: JSON of other tools has all of these.
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise RefusedRow(f"{where}.{key}: expected true, false, 0 or 1, got {shown(value)}")
        said[key] = bool(value) is TRAIN_FLAGS[key]
    if len({*said.values()}) > 1:
        raise RefusedRow(f"{where}: {' and '.join(sorted(said))} contradict each other")
    return all(said.values())


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, also if the row has them as JSON text.

    OpenAI's API writes text and Hugging Face's documentation an object. Most templates print
    `arguments | tojson`, which would put quotes around text, so that the model would learn to
    call tools with a string. Text that is no JSON object stays as it is, since models do write it.
    """
    function = call.get("function", call)
    arguments = function.get("arguments")
    value = json_of(arguments or "{}") if isinstance(arguments, str) else None
    if not is_object(value):
        return call
    function = {**function, "arguments": value}
    return {**call, "function": function} if "function" in call else function


def _check_content(value: object, where: str) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        raise wrong_kind(value, where, "a string or a list of parts")
    for i, one in enumerate(value):
        part = object_of(one, f"{where}[{i}]")
        if part.get("type") != "text":
            raise RefusedRow(f"{where}[{i}].type: expected 'text', got {shown(part.get('type'))}")
        _check_string(part.get("text"), f"{where}[{i}].text")


def _check_string(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise wrong_kind(value, where, "a string")


def _check_tool_calls(value: object, where: str) -> None:
    for i, call in enumerate(list_of(value, where)):
        at = f"{where}[{i}]"
        if "function" in object_of(call, at):
            call, at = call["function"], f"{at}.function"
        name = object_of(call, at).get("name")
        if not isinstance(name, str) or not name:
            raise RefusedRow(f"{at}.name: expected the name of a tool, got {shown(name)}")
        arguments = call.get("arguments")
        if not isinstance(arguments, str | dict | None):
            raise wrong_kind(arguments, f"{at}.arguments", "an object or a JSON string")


CHECKS: dict[str, Callable[[object, str], None]] = {
    "content": _check_content,
    **dict.fromkeys(REASONING, _check_string),
    "name": _check_string,
    "tool_call_id": _check_string,
    "tool_calls": _check_tool_calls,
}
"""Checks of the values of a message, by key."""


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if isinstance(value, str):  # ShareGPT rows and TRL have JSON text
        value = json_of(value or "[]")
        if value is None:
            raise RefusedRow("tools: the text is not JSON")
    tools = list_of(value, "tools")
    for i, tool in enumerate(tools):
        schema = object_of(tool, f"tools[{i}]").get("function", tool)
        if not isinstance(object_of(schema, f"tools[{i}].function").get("name"), str):
            raise RefusedRow(f"tools[{i}]: the tool has no name")
    return tools


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two texts or lists."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def list_of(value: object, where: str) -> list[Any]:
    """Return `value` if it is a list; else raise RefusedRow with its place `where`."""
    if not isinstance(value, list):
        raise wrong_kind(value, where, "a list")
    return value


def object_of(value: object, where: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object; else raise RefusedRow with its place `where`."""
    if not is_object(value):
        raise RefusedRow(f"{where} is {kind_of(value)}, not an object")
    return value


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return True if `value` is a JSON object."""
    return isinstance(value, Mapping)


def wrong_kind(value: object, where: str, expected: str) -> RefusedRow:
    """Return the refusal of a value of another type than the `expected`, a noun."""
    return RefusedRow(f"{where}: expected {expected}, got {kind_of(value)}")


def kind_of(value: object) -> str:
    """Return the JSON type of a value, as a noun."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def shown(value: object) -> str:
    """Return a short form of a value for a message."""
    text = repr(value) if value is not None else "nothing"
    return text if len(text) <= 40 else f"{text[:37]}..."
