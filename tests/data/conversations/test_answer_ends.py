"""Beginnings and ends of answers that a template shares with its prompt: reasoning, stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.conversation_files import write_tokenizer
from tokenizers import Tokenizer

from dtt.config.data import ChatConfig
from dtt.data.conversations.chat_encoder import ChatEncoder
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.rows import RefusedRow
from dtt.data.conversations.template import CHATML

NEXT_ROLE = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}"
    "{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}"
)
"""Each role's mark ends the text before it, as in GLM's templates; nothing ends the last."""
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
TAIL = (
    "{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ANSWER = "{% if m.role == 'assistant' %}"
ADDS = HEAD + ANSWER + "<think>\n\n</think>\n\n{% endif %}" + TAIL
DROPS = HEAD + ANSWER + "{% set c = c.split('</think>')[-1] %}{% endif %}" + TAIL
PARSES = (
    HEAD + ANSWER + "{% set r = '' %}{% if '<think>' in c and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
    "<think>\n{{ r }}\n</think>\n\n{% endif %}" + TAIL
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    facts = json.loads((Path(write_tokenizer(tmp_path).path) / "tokenizer.json").read_bytes())
    for token in facts["added_tokens"]:
        token["special"] &= "think" not in token["content"]  # as released models have them
    return Tokenizer.from_str(json.dumps(facts))


def targets(tokenizer: Tokenizer, template: str, answers: list[str], **keys: Any) -> list[str]:
    """Return the text of the targets of each sample."""
    encoder = ChatEncoder(
        tokenizer.to_str().encode(), ChatConfig(**keys), "tokenizer.json", template
    )
    messages = [
        {"role": role, "content": text}
        for answer in answers
        for role, text in (("user", "why?"), ("assistant", answer))
    ]
    samples = encoder.encode(parse_row({"messages": messages}))
    return [
        tokenizer.decode(one.ids[one.mask].tolist(), skip_special_tokens=False) for one in samples
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["so<|im_start|>yes<|im_start|>"]),
        ({"train_on": "last"}, ["yes<|im_start|>"]),
        ({"turns": "expand"}, ["so<|im_start|>", "yes<|im_start|>"]),
    ],
)
def test_the_last_answer_gets_the_stop_token_of_the_others(
    tokenizer: Tokenizer, keys: dict[str, Any], expected: list[str]
) -> None:
    assert targets(tokenizer, NEXT_ROLE, ["so", "yes"], **keys) == expected
    [everything] = targets(tokenizer, NEXT_ROLE, ["so"], train_on="all")
    assert everything.endswith("so<|im_start|>")
    assert targets(tokenizer, CHATML, ["so"]) == ["so<|im_end|>"]


@pytest.mark.parametrize(
    "content", ["because\n</think>\n\nyes", "<think>\nbecause\n</think>\n\nyes"]
)
def test_an_answer_has_its_reasoning_once_or_is_refused(tokenizer: Tokenizer, content: str) -> None:
    whole = "<think>\nbecause\n</think>\n\nyes<|im_end|>"
    assert targets(tokenizer, CHATML, [content]) == [whole]
    for template in (PARSES, HEAD + TAIL):  # the prompt holds the beginning
        assert targets(tokenizer, template, [content]) == [whole.removeprefix("<think>\n")]
    with pytest.raises(RefusedRow, match="another reasoning before"):
        targets(tokenizer, ADDS, [content])
    with pytest.raises(RefusedRow, match="leaves out the reasoning"):
        targets(tokenizer, DROPS, [content])
    assert targets(tokenizer, DROPS, [content, "fine"]) == ["\n\nyes<|im_end|>fine<|im_end|>"]


def test_half_of_a_character_is_a_bad_row_and_no_error_of_the_tokenizer(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(RefusedRow, match="half of a character"):
        targets(tokenizer, CHATML, ["a \ud83d"])
