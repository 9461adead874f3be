"""Rows of conversation files: their formats, their validation and the reasons to refuse them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
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
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of every template, which a row's `template_kwargs` cannot set."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a row."""


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

    def until(self, end: int) -> Conversation:
        """Return the conversation of the first `end` messages."""
        return Conversation(
            self.messages[:end], self.tools, self.template_kwargs, self.trained[:end]
        )


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same prompt and a preferred and a dispreferred answer."""

    chosen: Conversation
    rejected: Conversation


def parse_row(row: object) -> Conversation:
    """Return the conversation in a row, a decoded JSON object, with at least one answer.

    The formats, recognised by their keys, are `messages` (OpenAI), `prompt` and `completion`
    (strings or lists of messages), `conversations` (ShareGPT), and `instruction`, `input` and
    `output`. Raises RefusedRow with the reason.
    """
    value = _object(row)
    messages, answers_from = _messages_of(value)
    conversation = _conversation(value, messages, answers_from)
    if all(message["role"] != "assistant" for message in conversation.messages):
        raise RefusedRow("no message has the role assistant, so there is nothing to train on")
    return conversation


def parse_prompt(row: object) -> Conversation:
    """Return the conversation in a row like `parse_row`, which need not contain an answer."""
    value = _object(row)
    if "prompt" in value and "completion" not in value:
        return _conversation(value, _side(value["prompt"], "prompt", "user"), 0)
    messages, answers_from = _messages_of(value)
    return _conversation(value, messages, answers_from)


def parse_pair(row: object) -> PreferencePair:
    """Return the preferred and the dispreferred conversation in a row.

    `chosen` and `rejected` are strings or lists of messages. `prompt`, a string or a list of
    messages, precedes both; without it, the prompt is the longest common prefix of both. Only the
    messages after the prompt are trained. Raises RefusedRow with the reason.
    """
    value = _object(row)
    for key in ("chosen", "rejected"):
        if key not in value:
            raise RefusedRow(f"{key} is missing from a preference row")
    prompt = _side(value["prompt"], "prompt", "user") if "prompt" in value else []
    sides = [_side(value[key], key, "assistant") for key in ("chosen", "rejected")]
    if prompt:
        common = len(prompt)
        sides = [side if side[:common] == prompt else [*prompt, *side] for side in sides]
    else:
        common = _common(*sides)
    pair = [_conversation(value, side, common) for side in sides]
    for key, side in zip(("chosen", "rejected"), pair, strict=True):
        if all(message["role"] != "assistant" for message in side.messages[common:]):
            raise RefusedRow(f"{key} has no message with the role assistant after the prompt")
    return PreferencePair(*pair)


def _common(one: list[Any], other: list[Any]) -> int:
    """Return the length of the longest common prefix of two lists of messages."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _object(row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RefusedRow(f"the row is {_kind(row)}, not an object")
    _check_depth(row)
    return {key: value for key, value in row.items() if value is not None}


def _check_depth(value: object) -> None:
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
    raise RefusedRow(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _messages_of(row: dict[str, Any]) -> tuple[list[Any], int]:
    """Return the messages of a row and the index of the first that may be trained."""
    if "messages" in row:
        return _list(row["messages"], "messages"), 0
    if "prompt" in row and "completion" in row:
        prompt = _side(row["prompt"], "prompt", "user")
        return [*prompt, *_side(row["completion"], "completion", "assistant")], len(prompt)
    if "conversations" in row:
        return _from_sharegpt(row), 0
    if "instruction" in row and "output" in row:
        return _from_instruction(row), 0
    keys = ", ".join(sorted(map(str, row))[:10]) or "none"
    raise RefusedRow(
        "no messages: the row needs messages, prompt and completion, conversations, or "
        f"instruction and output; its keys: {keys}"
    )


def _side(value: Any, key: str, role: str) -> list[Any]:
    """Return the messages of a prompt or an answer, which may be a string."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _list(value, key)


def _from_sharegpt(row: dict[str, Any]) -> list[Message]:
    turns = _list(row["conversations"], "conversations")
    messages: list[Message] = []
    if "system" in row:
        messages.append({"role": "system", "content": row["system"]})
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise RefusedRow(f"conversations[{i}] is {_kind(turn)}, not an object")
        if "role" in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise RefusedRow(
                f"conversations[{i}].from: unknown role {_shown(speaker)}; "
                f"expected one of {', '.join(SHAREGPT_ROLES)}"
            )
        message = {"role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}
        if "train" in turn:
            message["train"] = turn["train"]
        messages.append(message)
    return messages


def _from_instruction(row: dict[str, Any]) -> list[Message]:
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(row.get(key, ""), str):
            raise RefusedRow(f"{key}: expected a string, got {_kind(row[key])}")
    question = "\n\n".join(text for key in ("instruction", "input") if (text := row.get(key)))
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [
        *system,
        {"role": "user", "content": question},
        {"role": "assistant", "content": row["output"]},
    ]


def _conversation(row: dict[str, Any], messages: list[Any], answers_from: int) -> Conversation:
    if not messages:
        raise RefusedRow("messages is empty")
    parsed, trained = [], []
    for i, message in enumerate(messages):
        clean, train = _message(message, f"messages[{i}]")
        parsed.append(clean)
        trained.append(train and i >= answers_from)
    kwargs = row.get("template_kwargs", {})
    if not _is_object(kwargs):
        raise RefusedRow(f"template_kwargs: expected an object, got {_kind(kwargs)}")
    if reserved := sorted(RESERVED & kwargs.keys()):
        raise RefusedRow(f"template_kwargs.{reserved[0]}: this variable cannot be set")
    return Conversation(tuple(parsed), _tools(row.get("tools")), kwargs, tuple(trained))


def _message(message: object, where: str) -> tuple[Message, bool]:
    """Return a checked message without nulls and without `train`, and the value of `train`."""
    if not _is_object(message):
        raise RefusedRow(f"{where} is {_kind(message)}, not an object")
    clean = {key: value for key, value in message.items() if value is not None}
    train = clean.pop("train", True)
    if not isinstance(train, bool):
        raise RefusedRow(f"{where}.train: expected true or false, got {_kind(train)}")
    role = clean.get("role")
    if role is None:
        raise RefusedRow(f"{where}.role is missing")
    if not isinstance(role, str) or role not in ROLES:
        raise RefusedRow(
            f"{where}.role: unknown role {_shown(role)}; expected one of {', '.join(sorted(ROLES))}"
        )
    for key in clean.keys() & CHECKS.keys():
        CHECKS[key](clean[key], f"{where}.{key}")
    if "tool_calls" in clean and role != "assistant":
        raise RefusedRow(f"{where}.tool_calls: only the assistant can call tools, not {role}")
    if "content" not in clean and not (role == "assistant" and _answers_without_content(clean)):
        raise RefusedRow(f"{where}.content is missing")
    return clean, train


def _answers_without_content(message: Message) -> bool:
    """Return True if an answer has tool calls or reasoning, so that it needs no content."""
    return any(message.get(key) for key in ("tool_calls", "reasoning_content", "thinking"))


def _check_content(value: object, where: str) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        raise RefusedRow(f"{where}: expected a string or a list of parts, got {_kind(value)}")
    for i, part in enumerate(value):
        if not _is_object(part):
            raise RefusedRow(f"{where}[{i}] is {_kind(part)}, not an object")
        kind = part.get("type")
        if kind != "text":
            raise RefusedRow(f"{where}[{i}].type: expected 'text', got {_shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise RefusedRow(f"{where}[{i}].text: expected a string, got {_kind(part.get('text'))}")


def _check_string(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise RefusedRow(f"{where}: expected a string, got {_kind(value)}")


def _check_tool_calls(value: object, where: str) -> None:
    for i, call in enumerate(_list(value, where)):
        at = f"{where}[{i}]"
        if not _is_object(call):
            raise RefusedRow(f"{at} is {_kind(call)}, not an object")
        if "function" in call:
            call, at = call["function"], f"{at}.function"
            if not _is_object(call):
                raise RefusedRow(f"{at} is {_kind(call)}, not an object")
        name = call.get("name")
        if not isinstance(name, str) or not name:
            raise RefusedRow(f"{at}.name: expected the name of a tool, got {_shown(name)}")
        arguments = call.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise RefusedRow(
                f"{at}.arguments: expected an object or a JSON string, got {_kind(arguments)}"
            )


CHECKS: dict[str, Callable[[object, str], None]] = {
    "content": _check_content,
    "reasoning_content": _check_string,
    "reasoning": _check_string,
    "thinking": _check_string,
    "name": _check_string,
    "tool_call_id": _check_string,
    "tool_calls": _check_tool_calls,
}
"""Checks of the values of a message, by key."""


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = _list(value, "tools")
    for i, tool in enumerate(tools):
        if not _is_object(tool):
            raise RefusedRow(f"tools[{i}] is {_kind(tool)}, not an object")
        schema = tool.get("function", tool)
        if not _is_object(schema):
            raise RefusedRow(f"tools[{i}].function is {_kind(schema)}, not an object")
        if not isinstance(schema.get("name"), str):
            raise RefusedRow(f"tools[{i}]: the tool has no name")
    return tools


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RefusedRow(f"{where}: expected a list, got {_kind(value)}")
    return value


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, Mapping)


def _kind(value: object) -> str:
    """Return the JSON type of a value, as a noun."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    """Return a short form of a value for a message."""
    text = repr(value) if value is not None else "nothing"
    return text if len(text) <= 40 else f"{text[:37]}..."
