"""Rows as other tools write them: each key is used as its author meant it, refused or reported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtt.data.conversations.dialects import (
    QUESTIONS,
    REFUSED,
    TEXTS,
    parse_pair,
    parse_prompt,
    parse_row,
)
from dtt.data.conversations.rows import (
    MAX_DEPTH,
    TOO_DEEP,
    TRAIN_FLAGS,
    Conversation,
    RefusedRow,
)
from dtt.data.conversations.template import CHATML, ChatTemplate
from dtt.data.corpus.documents import without_nulls

Q, A = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
EARLIER = [{"role": "user", "content": "EARLIER"}, {"role": "assistant", "content": "REPLY"}]
SYSTEM = {"role": "system", "content": "SYSTEM"}
SHAREGPT = [{"from": "human", "value": "QUESTION"}, {"from": "gpt", "value": "ANSWER"}]
ALPACA = {"instruction": "QUESTION", "input": "", "output": "ANSWER"}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
COMPLETION = {"prompt": "QUESTION", "completion": "ANSWER"}


@pytest.mark.parametrize("key", TRAIN_FLAGS)
@pytest.mark.parametrize("kind", [bool, int, float])
def test_a_flag_of_a_message_excludes_it_or_trains_it(key: str, kind: type) -> None:
    for trains in (True, False):
        value = kind(trains is TRAIN_FLAGS[key])
        for row in (
            {"messages": [Q, A | {key: value}]},
            {"conversations": [SHAREGPT[0], SHAREGPT[1] | {key: value}]},
        ):
            found = parse_row(row)
            assert found.trained == (True, trains)
            assert found.messages == (Q, A)


PASSAGE = "The bridge was opened in spring."
LONG = {"role": "user", "content": f"QUESTION\n{PASSAGE}"}
READ: list[tuple[dict[str, Any], list[dict[str, Any]], tuple[bool, ...]]] = [
    ({"messages": [Q, A, Q, A], "loss_mask": [0, 1, 0, 1]}, [Q, A, Q, A], (False, True) * 2),
    (ALPACA | {"history": [["EARLIER", "REPLY"]]}, [*EARLIER, Q, A], (True,) * 4),
    (ALPACA | {"system": "SYSTEM"}, [SYSTEM, Q, A], (True,) * 3),
    ({"instruction": "QUESTION", "response": "ANSWER"}, [Q, A], (True, True)),
    (ALPACA | {"context": PASSAGE}, [{**Q, "content": f"QUESTION\n\n{PASSAGE}"}, A], (True,) * 2),
    ({"messages": [Q, A], "prompt": "QUESTION", "conversations": SHAREGPT}, [Q, A], (True,) * 2),
    (
        {"messages": [LONG, A], "context": PASSAGE, "documents": [{"text": PASSAGE}]},
        [LONG, A],
        (True, True),
    ),
    ({"system": "SYSTEM", "messages": [Q, A]}, [SYSTEM, Q, A], (True,) * 3),
    ({"system_prompt": "SYSTEM", "messages": [Q, A]}, [SYSTEM, Q, A], (True,) * 3),
    ({"system": "SYSTEM", "messages": [SYSTEM, Q, A]}, [SYSTEM, Q, A], (True,) * 3),
    ({"system": "", "messages": [Q, A]}, [Q, A], (True, True)),
    ({"system": "SYSTEM", **COMPLETION}, [SYSTEM, Q, A], (False, False, True)),
    ({"system": "SYSTEM", "conversations": SHAREGPT}, [SYSTEM, Q, A], (True,) * 3),
    ({"messages": SHAREGPT}, [Q, A], (True, True)),
    ({"prompt": Q, "completion": A}, [Q, A], (False, True)),
    (
        ALPACA | {"input": "1 1", "system": "SYSTEM"},
        [SYSTEM, {**Q, "content": "QUESTION\n\n1 1"}, A],
        (True,) * 3,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages", "trained"), READ)
def test_a_row_is_read_as_its_author_meant_it(
    row: dict[str, Any], messages: list[dict[str, Any]], trained: tuple[bool, ...]
) -> None:
    found = parse_row(row)
    assert [*found.messages] == messages
    assert found.trained == trained
    assert found.unread == ()


UNUSED: list[dict[str, Any]] = [
    {"parallel_tool_calls": True}, {"ground_truth": "4", "reward": 1.0, "verifier": "math"},
    {"score_chosen": 3, "margin": 0.5}, {"text": "<s>RENDERED"},
]  # fmt: skip


@pytest.mark.parametrize("extra", UNUSED)
def test_metadata_changes_nothing_and_is_reported(extra: dict[str, Any]) -> None:
    nulls: dict[str, Any] = {"prompt": None, "images": None, "system": None}
    found = parse_row({"messages": [Q, A | {"tool_calls": None}], **nulls, **extra})
    assert (found.messages, found.unread) == ((Q, A), tuple(extra))


def test_function_calls_become_tool_calls() -> None:
    call = '{"name": "f", "arguments": {"x": 1}}'
    turns = [
        SHAREGPT[0],
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "2"},
        SHAREGPT[1],
    ]
    tools = '[{"name": "f", "parameters": {}}]'
    found = parse_row({"conversations": turns, "tools": tools})
    function = {"name": "f", "arguments": {"x": 1}}
    called = [{"type": "function", "function": function}]
    assert found.messages[1] == {"role": "assistant", "tool_calls": called}
    assert found.messages[2] == {"role": "tool", "content": "2"}
    assert found.tools == [{"name": "f", "parameters": {}}]


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', '{"x":1}'])
@pytest.mark.parametrize(
    "template", [CHATML, "{{ messages[1].tool_calls[0].function.arguments | tojson }}",
                 "{{ 'a' + messages[1].tool_calls[0].function.arguments }}"]
)  # fmt: skip
def test_arguments_render_alike_as_text_and_as_an_object(arguments: Any, template: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [Q, {"role": "assistant", "tool_calls": [call]}]}
    assert '{"x": 1}' in ChatTemplate(template).render(parse_row(row))


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def with_answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", **keys}]}


def calling(call: Any) -> dict[str, Any]:
    return with_answer(tool_calls=[call])


DEEP = "[" * 80 + "]" * 80
"""JSON text."""
WRONG: list[tuple[Any, str]] = [
    (COMPLETION | {"label": False}, "KTO"),
    (COMPLETION | {"label": 1}, "KTO"),
    (COMPLETION | {"label": "False"}, "KTO"),
    ({"text": "<s>RENDERED"}, "the row needs messages.*its keys: text"),
    ({"prompt": "QUESTION", "response": "ANSWER"}, "its keys: prompt, response"),
    ({"question": "QUESTION", "solution": "ANSWER"}, "its keys: question, solution"),
    ({"messages": [Q | {"content": [{"type": "image_url", "image_url": {}}]}, A]}, "'image_url'"),
    ({"messages": [Q, A], "kto_tag": True}, "KTO"),
    ({"messages": [Q, A], "images": ["a.png"]}, "trains on text"),
    ({"messages": [Q | {"images": ["a.png"]}, A]}, "trains on text"),
    ({"messages": [Q, A], "functions": [{"name": "f"}]}, "write tools"),
    ({"messages": [Q, A | {"function_call": {"name": "f"}}]}, "write tool_calls"),
    ({"messages": [Q, {"role": "function", "content": "1"}, A]}, "unknown role 'function'"),
    ({"messages": [Q, A, A | {"train_detail": [{}]}]}, r"messages\[2\].train_detail"),
    ({"messages": [Q, A | {"weight": 0.5}]}, "weight: expected true, false, 0 or 1"),
    ({"messages": [Q, A | {"weight": 1, "masked": True}]}, "masked and weight contradict"),
    ({"messages": [Q, A], "loss_mask": [1]}, "loss_mask has 1 values for 2 messages"),
    (COMPLETION | {"loss_mask": [1, 0]}, "loss_mask is read beside messages"),
    ({"messages": [Q, A], "history": [["a", "b"]]}, "history is not part of the conversation"),
    ({"messages": [Q, A], "history": [["a", "b"]], "instruction": ""}, "history is not part"),
    ({"messages": [Q, A], "context": PASSAGE}, "context is not part of the conversation"),
    ({"messages": [Q, A], "documents": [{"title": "T", "text": PASSAGE}]}, "documents is not part"),
    ({"messages": [Q, A], "conversations": [SHAREGPT[0]] * 2 + [{"value": "B"}]}, "conversations"),
    ({"messages": [Q, A], "input": PASSAGE}, "input is not part of the conversation"),
    (COMPLETION | {"passage": PASSAGE}, "passage is not part of the conversation"),
    (ALPACA | {"context": [PASSAGE]}, "context: expected a string, got a list"),
    (ALPACA | {"history": ["a"]}, r"history\[0\]: expected a question and an answer"),
    (ALPACA | {"response": "OTHER"}, "output and response contradict"),
    ({"system": "OTHER", "messages": [SYSTEM, Q, A]}, "are different"),
    ({"system": ["a"], "messages": [Q, A]}, "system: expected a string"),
    ({"input_ids": [1], "labels": [1]}, "tokenized already"),
    ({"messages": [Q, A], "tools": "{"}, "tools: the text is not JSON"),
    ({"messages": [Q, A], "tools": DEEP}, TOO_DEEP),
    ({"messages": [Q, A], "tools": "[" * 9000}, TOO_DEEP),
    (calling({"name": "f", "arguments": DEEP}), TOO_DEEP),
    ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": DEEP}]}, TOO_DEEP),
    ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "f(1)"}]}, "not JSON"),
    ({"messages": [Q, A | {"reasoning": "a", "thinking": "b"}]}, "different texts of reasoning"),
    ({"segments": [{"label": True, "text": "a"}]}, "segments is rendered text .* write messages"),
    (["a"], "the row is a list, not an object"),
    ({"messages": None}, "no messages"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hi"}, "messages: expected a list, got a string"),
    ({"messages": [HI]}, "no message has the role assistant"),
    ({"messages": [HI, "Hello"]}, r"messages\[1\] is a string, not an object"),
    ({"messages": [{"content": "Hi"}, HELLO]}, r"messages\[0\].role is missing"),
    ({"messages": [{"role": "bot", "content": "Hi"}]}, r"messages\[0\].role: unknown role 'bot'"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, r"messages\[0\].role: unknown role"),
    ({"messages": [{"role": "user"}, HELLO]}, r"messages\[0\].content is missing"),
    (with_answer(content=None), r"messages\[1\].content is missing"),
    (with_answer(content=7), r"messages\[1\].content: expected a string or a list of parts"),
    (with_answer(content=["a"]), r"messages\[1\].content\[0\] is a string, not an object"),
    (with_answer(content=[{"type": "image"}]), r"content\[0\].type: expected 'text', got 'image'"),
    (with_answer(content=[{"type": "text"}]), r"content\[0\].text: expected a string, got null"),
    (with_answer(content="a", train="no"), r"messages\[1\].train: expected true, false, 0 or 1"),
    (with_answer(content="a", reasoning_content=1), r"reasoning_content: expected a string"),
    (with_answer(content="a", name={}), r"messages\[1\].name: expected a string, got an object"),
    (with_answer(tool_calls={}), r"content is missing|tool_calls: expected a list"),
    (calling("f"), r"messages\[1\].tool_calls\[0\] is a string, not an object"),
    (calling({"function": "f"}), r"tool_calls\[0\].function is a string, not an object"),
    (calling({"function": {}}), r"tool_calls\[0\].function.name: expected the name of a tool"),
    (calling({"name": "f", "arguments": 1}), r"arguments: expected an object or a JSON string"),
    (
        {"messages": [HI | {"tool_calls": [{"name": "f"}]}, HELLO]},
        r"messages\[0\].tool_calls: only the assistant can call tools, not user",
    ),
    ({"messages": [HI, HELLO], "tools": {}}, "tools: expected a list, got an object"),
    ({"messages": [HI, HELLO], "tools": ["f"]}, r"tools\[0\] is a string, not an object"),
    ({"messages": [HI, HELLO], "tools": [{}]}, r"tools\[0\]: the tool has no name"),
    ({"messages": [HI, HELLO], "template_kwargs": 1}, "template_kwargs: expected an object"),
    (
        {"messages": [HI, HELLO], "template_kwargs": {"messages": []}},
        "template_kwargs.messages: this variable cannot be set",
    ),
    ({"messages": nested(MAX_DEPTH + 1)}, f"nested more than {MAX_DEPTH} deep"),
    ({"prompt": 1, "completion": "a"}, "prompt: expected a list, got a number"),
    ({"conversations": [1]}, r"messages\[0\] is a number, not an object"),
    ({"conversations": [{"from": "me", "value": ""}]}, r"\[0\].from: unknown role 'me'"),
    ({"conversations": [{"from": "human"}]}, r"messages\[0\].content is missing"),
    ({"instruction": 1, "output": "a"}, "instruction: expected a string, got a number"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "why"), WRONG, ids=[why[:30] for _, why in WRONG])
def test_a_row_that_would_be_trained_wrongly_is_refused(row: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedRow, match=why):
        parse_row(row)


PAIR = {"chosen": "GOOD", "rejected": "BAD"}


SIDES: list[dict[str, Any]] = [
    PAIR,
    {key: [{"role": "assistant", "content": text}] for key, text in PAIR.items()},
    {key: {"from": "gpt", "value": text} for key, text in PAIR.items()},
]


@pytest.mark.parametrize("key", QUESTIONS)
@pytest.mark.parametrize("sides", SIDES)
def test_a_pair_keeps_its_question_under_every_name(key: str, sides: dict[str, Any]) -> None:
    for value in ([Q], SHAREGPT[:1]) if key in ("messages", "conversations") else ("QUESTION",):
        pair = parse_pair({key: value, "system": "SYSTEM", "margin": 2, **sides})
        for side, answer in ((pair.chosen, "GOOD"), (pair.rejected, "BAD")):
            assert [m["content"] for m in side.messages] == ["SYSTEM", "QUESTION", answer]
            assert side.trained == (False, False, True)
        assert pair.chosen.unread == ("margin",)


def test_a_pair_may_repeat_what_it_contains() -> None:
    """As in UltraFeedback, which has the question and the chosen conversation twice."""
    sides = {"chosen": [Q, A], "rejected": [Q, A | {"content": "BAD"}]}
    pair = parse_pair({"prompt": "QUESTION", "messages": [Q, A], **sides})
    assert pair.chosen.messages == (Q, A)
    assert pair.chosen.trained == (False, True)
    with pytest.raises(RefusedRow, match="prompt and question are different questions"):
        parse_pair({"prompt": "one", "question": "two", **PAIR})


KEYS = st.sampled_from(
    [
        *("id", "source", "score", "label", "images", "system", "history", "loss_mask", "tools"),
        *("prompt", "weight", "text", "ground_truth", "template_kwargs", "labels"),
        *QUESTIONS,
        *REFUSED,
    ]
)
VALUES = st.sampled_from(
    ["TEXT", "", None, True, False, 0, 1, 2.5, [], {}, ["TEXT"], [0, 1], [Q], {"a": 1}]
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({"system": "TEXT", "history": True})
@example({"system": "TEXT", "history": "TEXT"})
def test_no_key_of_a_row_is_silently_ignored(extra: dict[str, Any]) -> None:
    """It is reported, refused, or changes the conversation, unless it repeats a text of it."""
    base = {"messages": [Q, A]}
    row = extra | base
    plain = parse_row(base)
    try:
        found = parse_row(row)
    except RefusedRow:
        return
    without = {key: value for key, value in row.items() if key not in found.unread}
    assert parse_row(without) == found
    for key in without.keys() - base.keys():
        empty = row[key] in (None, "", [], {}, False)
        try:
            rest = parse_row({k: v for k, v in without.items() if k != key})
        except RefusedRow:  # the value that is left repeated this one
            continue
        texts = [message["content"] for message in found.messages]
        repeats = key in TEXTS and row[key] in (*texts, *([text] for text in texts), [Q])
        assert empty or repeats or rest != found or found == plain == rest, key


def test_nulls_that_parquet_pads_with_are_dropped_at_any_depth_only_where_rows_are_padded() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    row = {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    kept = parse_row(row).messages[1]
    assert kept == {"role": "assistant", "tool_calls": [call]}
    padded = parse_row(without_nulls(row)).messages[1]
    assert padded["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]


def test_a_prompt_needs_no_answer() -> None:
    assert parse_prompt({"prompt": "Hi"}).messages == (HI,)
    assert parse_prompt({"messages": [HI]}).messages == (HI,)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [HI], "chosen": [HELLO], "rejected": [HELLO | {"content": "No"}]},
        {"chosen": [HI, HELLO], "rejected": [HI, HELLO | {"content": "No"}]},
        {
            "prompt": "Hi",
            "chosen": [HI, HELLO],
            "rejected": [HI, HELLO | {"content": "No"}],
        },
    ],
)
def test_a_preference_row_trains_only_what_follows_the_common_prompt(row: Any) -> None:
    pair = parse_pair(row)
    assert pair.chosen == Conversation((HI, HELLO), trained=(False, True))
    assert pair.rejected.messages == (HI, HELLO | {"content": "No"})
    assert pair.rejected.trained == (False, True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "Hi", "chosen": "Hello"}, "rejected is missing"),
        ({"chosen": [HI], "rejected": [HI]}, "chosen has no message with the role"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": 1}, "rejected: expected a list"),
    ],
)
def test_a_wrong_preference_row_is_refused(row: Any, why: str) -> None:
    with pytest.raises(RefusedRow, match=why):
        parse_pair(row)


def test_reasons_and_keys_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from dtt.data.conversations.dialects import parse_row\n"
        "from dtt.data.conversations.rows import RefusedRow\n"
        "chat = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]\n"
        "row = {'messages': chat, 'topic': 1, 'source': 2, 'id': 3}\n"
        "print(parse_row(row).unread)\n"
        "for wrong in ({'label': True, 'images': [1], 'functions': [1], 'input_ids': [1]},\n"
        "              {'messages': [{**chat[0], 'image': 1, 'audio': 1, 'train_detail': 1}]},\n"
        "              {'messages': [{**chat[0], 'weight': 7, 'masked': 7, 'loss': 7}]},\n"
        "              {'messages': [{'role': 'user', 'content': 1, 'name': 2, 'thinking': 3}]}):\n"
        "    try: parse_row({**row, **wrong})\n"
        "    except RefusedRow as refused: print(refused.why)\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "1234"
    }
    assert len(said) == 1
