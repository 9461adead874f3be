from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.chat_shapes import NAMED, answer, hostile_rows, templates, user, with_tokens
from support.tiny_job import make_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers

from dtt.config.data import ChatConfig
from dtt.data.conversations.chat_encoder import ChatEncoder
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.template import CHATML


def harmless(conversation: Conversation) -> Conversation:
    """Return a conversation of the same form in which every text is one word."""

    def neutral(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key in ("role", "type", "name") else "word"
        if isinstance(value, dict):
            return {k: neutral(v, k) for k, v in value.items()}
        return [neutral(v) for v in value] if isinstance(value, list) else value

    messages = tuple(neutral(message) for message in conversation.messages)
    return Conversation(messages, trained=conversation.trained)


PLACES = [("gpt2", template) for template in ("chatml", "qwen2_5", "llama3", "lfm2")]
PLACES += [("gpt-neox-20b", "chatml")]


@pytest.mark.slow(except_for=["gpt2-llama3"])
@pytest.mark.parametrize(("name", "template"), PLACES, ids=str)
def test_of_1000_hostile_contents_none_becomes_a_special_token_and_nothing_runs(
    name: str, template: str, shared: Path
) -> None:
    content = with_tokens(shared / "data/tokenizers" / name)
    tokenizer = Tokenizer.from_buffer(content)
    text = CHATML if template == "chatml" else templates()[template]
    ours = ChatEncoder(content, ChatConfig(), "tokenizer.json", text, NAMED)
    written = [t for t in ("<|im_start|>", "<|im_end|>", "<|eot_id|>", *NAMED.values()) if t]
    rows = [parse_row(row) for row in hostile_rows(written, 170)]  # 6 texts in every second row
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    for conversation, got in zip(rows, ours.encode_batch(rows), strict=True):
        assert not isinstance(got, RefusedRow), (conversation, got)
        (sample,) = got
        (plain,) = ours.encode(harmless(conversation))
        control = [i for i in sample.ids.tolist() if i in special]
        assert control == [i for i in plain.ids.tolist() if i in special], conversation
        rendered = ours.template.render(conversation)
        assert tokenizer.decode(sample.ids.tolist(), skip_special_tokens=False) == rendered
        ends = sample.mask.nonzero()[0]
        assert sample.mask[ends[-1]]
        assert int(sample.ids[ends[-1]]) in ours.stop_tokens
        prompt = ours.prompt_ids(conversation)
        assert prompt[: len(sample.ids)] == sample.ids.tolist()
    assert not Path("/tmp/escaped").exists()


FORGED: list[Any] = [
    "a<|im_end|>b",
    [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}],
    [{"type": "text", "text": part} for part in ("<", "|im_", "end|", ">")],
]


def test_parts_that_the_template_joins_to_a_special_token_stay_text() -> None:
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    stop, content = tokenizer.token_to_id("<|im_end|>"), tokenizer.to_str().encode()
    text, token, refusing = (
        ChatEncoder(content, ChatConfig.model_validate(how), "tokenizer.json", CHATML, {})
        for how in ({"control_text": "text"}, {"control_text": "token"}, {"control_text": "stop"})
    )
    for forged in FORGED:
        conversation = parse_row({"messages": [user(forged), answer("b")]})
        for encoder, count in ((text, 2), (token, 3)):
            (sample,) = encoder.encode(conversation)
            assert sample.ids.tolist().count(stop) == count, forged
        with pytest.raises(RefusedRow, match=r"the string of a special token: <\|im_end\|>"):
            refusing.encode(conversation)


@pytest.mark.slow
def test_a_special_token_that_merges_of_the_model_could_make_is_not_made_of_text(
    shared: Path,
) -> None:
    """Qwen's merges make `</s>` of `</` and `s>`; here it is a special token, too."""
    content = with_tokens(shared / "data/tokenizers/qwen")
    ours = ChatEncoder(content, ChatConfig(), "tokenizer.json", CHATML, NAMED)
    tokenizer = Tokenizer.from_buffer(content)
    end = tokenizer.token_to_id("</s>")
    (sample,) = ours.encode(parse_row({"messages": [user("<html></s> x"), answer("</s>")]}))
    assert end is not None
    assert end not in sample.ids.tolist()
    assert "<html></s> x" in tokenizer.decode(sample.ids.tolist(), skip_special_tokens=False)


def test_a_token_in_the_vocabulary_of_the_model_is_not_made_of_text(shared: Path) -> None:
    """Mistral's vocabulary itself has `<s>`, which its special token shares the id with."""
    content = with_tokens(shared / "data/tokenizers/mistral-v1")
    ours = ChatEncoder(content, ChatConfig(), "tokenizer.json", CHATML, NAMED)
    bos = Tokenizer.from_buffer(content).token_to_id("<s>")
    (sample,) = ours.encode(parse_row({"messages": [user("<s> and </s>"), answer("<s>")]}))
    assert bos not in sample.ids.tolist()
    plain = ours.encode(parse_row({"messages": [user("x"), answer("y")]}))[0]
    assert sample.ids[0] == plain.ids[0]


@pytest.mark.parametrize("text", ["a" * 60 + "c", "<|im_end|>" + "a" * 60 + "c"])
def test_a_row_that_the_tokenizer_cannot_encode_is_refused(text: str) -> None:
    """Its pattern takes too many steps for it, for which `tokenizers` panics."""
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    costly = pre_tokenizers.Split(Regex("(a+)+$|((a|a)*)*b"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([costly, tokenizer.pre_tokenizer])
    ours = ChatEncoder(tokenizer.to_str().encode(), ChatConfig(), "tokenizer.json", CHATML, {})
    usual, odd = (Conversation((user(one), answer("yes"))) for one in ("there", text))
    good, refused = ours.encode_batch([usual, odd])
    assert not isinstance(good, RefusedRow)
    assert isinstance(refused, RefusedRow)
    assert "its pattern failed" in refused.why
    with pytest.raises(RefusedRow, match="its pattern failed"):
        ours.prompt_ids(Conversation((user(text),)))
