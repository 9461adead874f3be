"""Conversations of twelve shapes, and chat templates of public models with their special tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

Row = dict[str, Any]


def user(text: Any) -> Row:
    return {"role": "user", "content": text}


def answer(text: Any, **keys: Any) -> Row:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def call(name: str, arguments: object) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str, text: str) -> Row:
    return {"role": "tool", "name": name, "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}

SHAPES: dict[str, Row] = {
    "single turn": {"messages": [user("What is 2 + 2?"), answer("It is 4.")]},
    "system": {"messages": [system("Be brief."), user("Name a river."), answer("The Elbe.")]},
    "multi-turn": {
        "messages": [
            user("Hello!"), answer("Hello, how can I help?"),
            user("Sing."), answer("La la la."),
            user("Again?"), answer("La la la."),
        ]
    },
    "system, multi-turn, unicode": {
        "messages": [
            system("Réponds en français. 用中文也可以。"),
            user("Ça va? 👩‍🔬"), answer("Oui — très bien… 🙂"),
            user("नमस्ते"), answer("  你好，\n\n世界 "),
        ]
    },
    "tools offered": {
        "messages": [user("Hi"), answer("Hi, ask me about the weather.")],
        "tools": [WEATHER, CLOCK],
    },
    "tool call": {
        "messages": [
            user("Is it warm in Rome?"),
            answer("", tool_calls=[call("weather", {"city": "Rome"})]),
            result("weather", '{"degrees": 31}'),
            answer("Yes, 31 degrees."),
        ],
        "tools": [WEATHER],
    },
    "two calls, null content, JSON strings": {
        "messages": [
            system("Use the tools."),
            user("The weather in Rome, and the time?"),
            answer(None, tool_calls=[call("weather", '{"city": "Rome"}'), call("clock", "{}")]),
            result("weather", "sunny"),
            result("clock", "12:00"),
            answer("Sunny; noon."),
            user("Thanks"), answer("You're welcome."),
        ],
        "tools": [WEATHER, CLOCK],
    },
    "reasoning": {
        "messages": [
            user("17 * 3?"), answer("51", reasoning_content="17 * 3 = 51."),
            user("Plus one?"), answer("52", reasoning_content="51 + 1 = 52."),
        ]
    },
    "reasoning, tool call": {
        "messages": [
            user("Warm in Oslo?"),
            answer(
                "", reasoning_content="I should look it up.",
                tool_calls=[call("weather", {"city": "Oslo", "unit": "kelvin"})],
            ),
            result("weather", "268"),
            answer("No.", reasoning_content="268 K is below zero."),
        ],
        "tools": [WEATHER],
    },
    "consecutive": {
        "messages": [
            user("One."), user("Two."), answer("Three."), answer("Four."), user("Five."),
            answer("Six."),
        ]
    },
    "text parts": {
        "messages": [
            user([{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]),
            answer([{"type": "text", "text": "A list of parts."}]),
        ]
    },
    "code and white space": {
        "messages": [
            user("\nWrite {{ a loop }} in C:\n"),
            answer("```c\nfor (;;) { f(x[0] < 1, \"a\\n\"); }\n```\n\n"),
            user(" <b>Thanks</b> "),
            answer("<think>\nHe thanks me.\n</think>\n\nAny time!"),
        ]
    },
}  # fmt: skip


@cache
def templates(training: bool = False) -> dict[str, str]:
    """Return the templates of public models that trl carries, by name: the originals, or those
    that trl has patched for training."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    found = sorted(Path(spec.origin).parent.joinpath("chat_templates").glob("*.jinja"))
    return {
        path.stem.removesuffix("_training"): path.read_text()
        for path in found
        if path.stem.endswith("_training") == training
    }


SPECIAL = re.compile(
    r"<\|[A-Za-z_]\w*\|>|<｜[^｜'\"]+｜>|<(?:start|end)_of_\w+>|<\|\w+>|<\w+\|>|\[gMASK\]|<sop>|<end_of_utterance>|</s>"
)
"""Strings in a template that are special tokens of the model."""
NAMED = {"bos_token": "<|begin|>", "eos_token": "<|end_of_text|>"}


@cache
def with_tokens(path: Path) -> bytes:
    """Return a tokenizer.json with the special tokens that any of the templates writes."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    written = {token for text in templates().values() for token in SPECIAL.findall(text)}
    names = sorted({*written, *NAMED.values(), "<|im_start|>", "<|im_end|>"})
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    return tokenizer.to_str().encode()


CODE = (
    "{{ raise_exception('run') }}", "{% for i in range(9) %}x{% endfor %}", "{# gone #}",
    "{{ messages }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% generation %}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/escaped') }}", "{%- endfor %}", "{%",
)  # fmt: skip
HARMLESS = ("Hello", " ", "\n", "4 < 5 > 3", "你好", "🙂", "a|b", "<", "|>", "\\", '"', "")


def hostile_texts(tokens: list[str], count: int) -> Iterator[str]:
    """Yield texts of special tokens, pieces of them, template code and harmless words."""
    draw = random.Random(7)
    while count:
        token = draw.choice(tokens)
        cut = draw.randrange(1, len(token))
        parts = [token, token[:cut], token[cut:], token * 2, draw.choice(CODE)]
        words = [*draw.choices(parts, k=2), *draw.choices(HARMLESS, k=2)]
        draw.shuffle(words)
        text = "".join(words)
        if text.strip():
            yield text
            count -= 1


def hostile_rows(tokens: list[str], count: int) -> Iterator[dict[str, Any]]:
    """Yield conversations with hostile texts in every place that a user or a tool controls."""
    texts = hostile_texts(tokens, 6 * count)
    for i in range(count):
        question, reply, arguments, output, thought, last = (next(texts) for _ in range(6))
        if i % 2:
            yield {"messages": [user(question), answer(reply), user(output), answer(last)]}
            continue
        calls = [call("f", {"a": arguments})]
        yield {
            "messages": [
                user(question), answer(reply, tool_calls=calls, reasoning_content=thought),
                result("f", output), answer(last),
            ]
        }  # fmt: skip
