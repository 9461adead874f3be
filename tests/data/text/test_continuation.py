"""The text of tokens behind a prompt: that of prompt and tokens together, in any pieces."""

from __future__ import annotations

from functools import cache

import pytest
from support.tiny_job import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from dtt.data.text.continuation import Continuation, TokenDecoder

BYTES = [f"<0x{value:02X}>" for value in range(256)]
WORDS = ["▁", "a", "b", "é", "▁a", "▁b", "ab"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """A byte-level tokenizer, or one of the decoders of SentencePiece models."""
    if kind == "byte-level":
        return make_tokenizer("<|hidden|>")
    vocabulary = {token: i for i, token in enumerate(["<unk>", *BYTES, *WORDS])}
    found = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁", "b"), ("a", "b")], byte_fallback=True)
    )
    if kind == "byte fallback":
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        found.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        found.decoder = decoders.Metaspace(prepend_scheme="first")
    found.add_special_tokens(["<|hidden|>"])
    return found


KINDS = ["byte-level", "byte fallback", "metaspace"]
TEXTS = [" a b", "é 🙂 b", "b", "", "🙂🙂é", "a<|hidden|> b", " �a"]
PROMPTS = ["", "a b", "a ", "🙂", "a<|hidden|>"]
CASES = [
    (kind, prompt, text)
    for kind in KINDS
    for prompt in PROMPTS
    for text in TEXTS
    if kind != "metaspace" or not set(prompt + text) & set("🙂�")  # it has no bytes
]


@pytest.mark.parametrize(("kind", "prompt", "text"), CASES)
def test_prompt_and_continuation_read_as_they_are_decoded_together(
    kind: str, prompt: str, text: str
) -> None:
    own = tokenizer(kind)
    ids = own.encode(prompt + text).ids
    for split in range(len(ids) + 1):
        before = own.decode(ids[:split], skip_special_tokens=True)
        if before.endswith("�"):  # within a character
            continue
        reply = Continuation(own, ids[:split])
        pieces = [reply.add(token) for token in ids[split:]]
        assert "�" not in "".join(pieces) or "�" in text
        assert before + "".join(pieces) + reply.end() == own.decode(ids, skip_special_tokens=True)
        assert before + reply.content == own.decode(ids, skip_special_tokens=True)
        assert (reply.ids, reply.finish_reason) == (ids[split:], "length")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_bytes_that_are_no_text_become_replacement_characters(kind: str) -> None:
    own = tokenizer(kind)
    invalid = own.encode("🙂").ids[-1]  # continues a character that has no beginning
    decoder = TokenDecoder(own, own.encode("a").ids, show_special=True)
    pieces = [decoder.add(invalid) for _ in range(40)]
    assert "".join(pieces) == "�" * 37  # three may still belong to a character
    assert len(decoder._ids) < 8  # the cost of a token does not grow
    assert "".join(map(decoder.add, own.encode("b").ids)).strip() in ("���b", "��� b")
    assert decoder.end() == ""


def test_a_stop_token_or_text_ends_it_and_nothing_is_held_back() -> None:
    own = tokenizer("byte-level")
    *text, end = own.encode("ab🙂"[:2]).ids + own.encode("<|hidden|>").ids
    reply = Continuation(own, [], (end,), ["bc"])
    assert [reply.add(token) for token in text] == ["a", ""]  # "b" may begin "bc"
    assert (reply.add(end), reply.stopped, reply.end()) == ("b", True, "")
    assert (reply.content, reply.ids) == ("ab", text)
