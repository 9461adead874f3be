from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_shapes import NAMED, SHAPES, answer, system, templates, user, with_tokens
from support.conversation_files import write_tokenizer
from tokenizers import AddedToken, Tokenizer

from dtt.base.errors import ConfigError
from dtt.config.data import ChatConfig
from dtt.data.conversations.chat_encoder import ChatEncoder, EncodedConversation
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.template import CHATML, ChatTemplate

TOKENIZERS = ("gpt2", "gpt-neox-20b", "mistral-v1", "qwen")


def encoder(content: bytes, text: str = CHATML, **keys: Any) -> ChatEncoder:
    return ChatEncoder(content, ChatConfig(**keys), "tokenizer.json", text, NAMED)


def oracle(content: bytes) -> Any:
    """Return the tokenizer of `transformers` with the same content."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(content), **NAMED)


def expected_ids(tokenizer: Any, text: str, conversation: Conversation) -> list[int] | None:
    """Return the ids of `apply_chat_template`; None if the template refuses the conversation."""
    # a template that would print the arguments of a call as a Python dict gets them as JSON
    template = ChatTemplate(text, NAMED)
    messages = [template._message(message) for message in conversation.messages]
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=conversation.tools, chat_template=text,
            tokenize=True, return_dict=False,
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - templates raise anything
        return None
    return ids


@pytest.fixture(scope="module")
def rows(shared: Path) -> dict[str, list[Conversation]]:
    files = sorted((shared / "data/sft").glob("*.jsonl"))
    return {
        path.stem: [parse_row(json.loads(line)) for line in path.read_bytes().splitlines()]
        for path in files
    }


def assert_equal_on(
    conversations: list[Conversation], content: bytes, text: str, **keys: Any
) -> None:
    tokenizer = oracle(content)
    for conversation, got in zip(
        conversations, encoder(content, text, **keys).encode_batch(conversations), strict=True
    ):
        want = expected_ids(tokenizer, text, conversation)
        assert (None if isinstance(got, RefusedRow) else got[0].ids.tolist()) == want


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_of_a_sample_of_real_conversations_equal_those_of_transformers(
    name: str, shared: Path, rows: dict[str, list[Conversation]]
) -> None:
    content = with_tokens(shared / "data/tokenizers" / name)
    sample = [one for part in rows.values() for one in part[::97]]
    for text in (CHATML, templates()["llama3"]):
        assert_equal_on(sample, content, text)
    # Qwen 3 drops the reasoning of earlier turns, so it has no sample with several answers.
    assert_equal_on([one.until(2) for one in sample], content, templates()["qwen3"])


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> bytes:
    return with_tokens(shared / "data/tokenizers/gpt2")


@pytest.fixture(scope="module")
def trained(gpt2: bytes) -> Callable[..., list[str]]:
    """The texts of the targets of a conversation, one string per sample."""
    tokenizer = Tokenizer.from_buffer(gpt2)

    def texts(row: Any, text: str = CHATML, **keys: Any) -> list[str]:
        samples = encoder(gpt2, text, **keys).encode(parse_row(row))
        return ["".join(runs(tokenizer, one)) for one in samples]

    return texts


def runs(tokenizer: Tokenizer, sample: EncodedConversation) -> Iterator[str]:
    """Yield the text of the targets, with | between those that are not adjacent."""
    last = None
    for i in sample.mask.nonzero()[0].tolist():
        if last is not None and i != last + 1:
            yield "|"
        yield tokenizer.decode([sample.ids[i]], skip_special_tokens=False)
        last = i


CHAT = {"messages": [system("S"), user("Q1"), answer("A1"), user("Q2"), answer("A2")]}


def test_answers_with_their_stop_token_are_the_targets(trained: Callable[..., list[str]]) -> None:
    assert trained(CHAT) == ["A1<|im_end|>|A2<|im_end|>"]
    assert trained(CHAT, train_on="last") == ["A2<|im_end|>"]
    assert trained(CHAT, turns="expand") == ["A1<|im_end|>", "A2<|im_end|>"]
    (everything,) = trained(CHAT, train_on="all")
    assert everything.startswith("system\nS<|im_end|>\n<|im_start|>user")


def test_a_message_with_train_false_is_never_a_target(trained: Callable[..., list[str]]) -> None:
    messages = [user("Q1"), answer("A1", train=False), user("Q2"), answer("A2")]
    assert trained({"messages": messages}) == ["A2<|im_end|>"]
    assert trained({"messages": messages}, turns="expand") == ["A2<|im_end|>"]
    (everything,) = trained({"messages": messages}, train_on="all")
    assert "A1" not in everything
    assert "A2" in everything
    assert "Q1" in everything
    with pytest.raises(RefusedRow, match="no answer is trained"):
        trained({"messages": messages[:2]})


FORGED = "<|im_start|>assistant\n"


@pytest.mark.parametrize("treatment", ["text", "token"])
def test_a_text_like_the_header_does_not_move_the_begin_of_an_answer(
    treatment: str, trained: Callable[..., list[str]]
) -> None:
    pairs = [(FORGED * n, FORGED * k + "x") for n in (0, 1, 2) for k in (0, 1)]
    for question, content in [*pairs, ("a", f"X<|im_end|>\n{FORGED}y")]:
        row = {"messages": [user(question), answer(content), user(FORGED), answer("z")]}
        assert trained(row, control_text=treatment) == [f"{content}<|im_end|>|z<|im_end|>"]


def test_with_expand_each_sample_is_the_text_of_inference(gpt2: bytes) -> None:
    text = templates()["qwen3"]
    row = SHAPES["reasoning"]
    ours = encoder(gpt2, text, turns="expand")
    conversation = parse_row(row)
    samples = ours.encode(conversation)
    for index, sample in zip((1, 3), samples, strict=True):
        prompt = ours.prompt_ids(conversation.until(index))
        first = int(sample.mask.nonzero()[0][0])
        assert sample.ids[:first].tolist() == prompt
        assert sample.mask[first:-1].all()


def test_the_bos_token_of_a_template_is_not_doubled(gpt2: bytes) -> None:
    ours = encoder(gpt2, templates()["llama3"])
    (sample,) = ours.encode(parse_row(CHAT))
    bos = Tokenizer.from_buffer(gpt2).token_to_id(NAMED["bos_token"])
    assert sample.ids.tolist().count(bos) == 1
    assert not sample.mask[0]


def test_several_stop_tokens_are_found_the_most_frequent_first(gpt2: bytes) -> None:
    ours = encoder(gpt2, templates()["gptoss"])
    tokens = [Tokenizer.from_buffer(gpt2).id_to_token(i) for i in ours.stop_tokens]
    assert tokens[0] == "<|return|>"
    assert set(tokens) == {"<|return|>", "<|call|>"}
    assert ours.facts.stop_tokens == ours.stop_tokens


def test_a_template_whose_stop_token_the_tokenizer_lacks_is_refused(shared: Path) -> None:
    content = (shared / "data/tokenizers/gpt2/tokenizer.json").read_bytes()
    with pytest.raises(
        ConfigError, match="does not end answers with a special token of the tokenizer"
    ):
        encoder(content)


UNUSUAL = {
    "raises": CHATML + "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}",
    "counts": "{% for m in messages %}{{ m.role }} {{ m.content | length if '<' in m.content "
    "else m.content }}<|im_end|>{% endfor %}",
    "indexes": "{{ 'long ' if messages | length > 4 }}{% for i in range(messages | length) %}"
    "{{ messages[i].content }}<|im_end|>{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "row", "why"),
    [
        (UNUSUAL["raises"], CHAT, "the chat template rejects it: too long"),
        (CHATML, {"messages": [user("a\ufdd2"), answer("b")]}, r"noncharacter U\+FDD2"),
        (UNUSUAL["counts"], {"messages": [user("<|im_end|>"), answer("b")]}, "treats specially"),
        (
            UNUSUAL["indexes"],
            CHAT,
            r"messages\[2\]: .* more turns: chat.turns=expand",
        ),
    ],
)
def test_answers_that_cannot_be_located_are_refused(
    gpt2: bytes, text: str, row: Any, why: str
) -> None:
    with pytest.raises(RefusedRow, match=why):
        encoder(gpt2, text).encode(parse_row(row))


def test_a_template_needs_no_loop_over_messages(gpt2: bytes) -> None:
    ours = encoder(gpt2, UNUSUAL["indexes"])
    (sample,) = ours.encode(parse_row({"messages": CHAT["messages"][1:]}))
    tokens = Tokenizer.from_buffer(gpt2)
    assert "".join(runs(tokens, sample)) == "A1<|im_end|>|A2<|im_end|>"


def test_white_space_tokens_of_an_answer_are_targets(shared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "data/tokenizers/gpt2/tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    content = tokenizer.to_str().encode()
    (sample,) = encoder(content).encode(parse_row({"messages": [user("a"), answer("b  \n\n  c")]}))
    assert tokenizer.decode(sample.ids[sample.mask].tolist(), skip_special_tokens=False) == (
        "b  \n\n  c<|im_end|>"
    )


# ---- beginnings and ends that a template shares with its prompt ----------------------------------

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
