from __future__ import annotations

from typing import Any

import pytest

from dtt.data.conversations.dialects import parse_pair, parse_prompt, parse_row
from dtt.data.conversations.rows import MAX_DEPTH, Conversation, RefusedRow
from dtt.data.corpus.json_rows import without_nulls

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def test_an_instruction_and_its_input_are_one_question_after_the_system_prompt() -> None:
    row = {"instruction": "Add.", "input": "1 1", "output": "2", "system": "Be exact."}
    assert [message["content"] for message in parse_row(row).messages] == [
        "Be exact.", "Add.\n\n1 1", "2",
    ]  # fmt: skip


def test_nulls_that_parquet_pads_with_are_dropped_at_any_depth_only_where_rows_are_padded() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    row = {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    kept = parse_row(row).messages[1]
    assert kept == {"role": "assistant", "tool_calls": [call]}
    padded = parse_row(without_nulls(row)).messages[1]
    assert padded["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]


def test_a_prompt_needs_no_answer() -> None:
    assert parse_prompt({"prompt": "Hi"}).messages == (QUESTION,)
    assert parse_prompt({"messages": [QUESTION]}).messages == (QUESTION,)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No"}]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER | {"content": "No"}]},
        {
            "prompt": "Hi",
            "chosen": [QUESTION, ANSWER],
            "rejected": [QUESTION, ANSWER | {"content": "No"}],
        },
    ],
)
def test_a_preference_row_trains_only_what_follows_the_common_prompt(row: Any) -> None:
    pair = parse_pair(row)
    assert pair.chosen == Conversation((QUESTION, ANSWER), trained=(False, True))
    assert pair.rejected.messages == (QUESTION, ANSWER | {"content": "No"})
    assert pair.rejected.trained == (False, True)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def with_answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", **keys}]}


def calling(call: Any) -> dict[str, Any]:
    return with_answer(tool_calls=[call])


REFUSED: list[tuple[Any, str]] = [
    (["a"], "the row is a list, not an object"),
    ({"text": "a"}, "no messages: the row needs messages, .*; its keys: text"),
    ({"messages": None}, "no messages"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hi"}, "messages: expected a list, got a string"),
    ({"messages": [QUESTION]}, "no message has the role assistant"),
    ({"messages": [QUESTION, "Hello"]}, r"messages\[1\] is a string, not an object"),
    ({"messages": [{"content": "Hi"}, ANSWER]}, r"messages\[0\].role is missing"),
    ({"messages": [{"role": "bot", "content": "Hi"}]}, r"messages\[0\].role: unknown role 'bot'"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, r"messages\[0\].role: unknown role"),
    ({"messages": [{"role": "user"}, ANSWER]}, r"messages\[0\].content is missing"),
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
        {"messages": [QUESTION | {"tool_calls": [{"name": "f"}]}, ANSWER]},
        r"messages\[0\].tool_calls: only the assistant can call tools, not user",
    ),
    ({"messages": [QUESTION, ANSWER], "tools": {}}, "tools: expected a list, got an object"),
    ({"messages": [QUESTION, ANSWER], "tools": ["f"]}, r"tools\[0\] is a string, not an object"),
    ({"messages": [QUESTION, ANSWER], "tools": [{}]}, r"tools\[0\]: the tool has no name"),
    ({"messages": [QUESTION, ANSWER], "template_kwargs": 1}, "template_kwargs: expected an object"),
    (
        {"messages": [QUESTION, ANSWER], "template_kwargs": {"messages": []}},
        "template_kwargs.messages: this variable cannot be set",
    ),
    ({"messages": nested(MAX_DEPTH + 1)}, f"nested more than {MAX_DEPTH} deep"),
    ({"prompt": 1, "completion": "a"}, "prompt: expected a list, got a number"),
    ({"conversations": [1]}, r"messages\[0\] is a number, not an object"),
    ({"conversations": [{"from": "me", "value": ""}]}, r"\[0\].from: unknown role 'me'"),
    ({"conversations": [{"from": "human"}]}, r"messages\[0\].content is missing"),
    ({"instruction": 1, "output": "a"}, "instruction: expected a string, got a number"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "why"), REFUSED, ids=[why[:40] for _, why in REFUSED])
def test_a_wrong_row_is_refused_with_the_place_and_the_reason(row: Any, why: str) -> None:
    with pytest.raises(RefusedRow, match=why):
        parse_row(row)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "Hi", "chosen": "Hello"}, "rejected is missing"),
        ({"chosen": [QUESTION], "rejected": [QUESTION]}, "chosen has no message with the role"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": 1}, "rejected: expected a list"),
    ],
)
def test_a_wrong_preference_row_is_refused(row: Any, why: str) -> None:
    with pytest.raises(RefusedRow, match=why):
        parse_pair(row)
