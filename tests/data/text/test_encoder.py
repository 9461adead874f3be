"""Ids are those of Hugging Face's tokenizers, whatever encodes; no text can end its document."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import threading
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.base.errors import ConfigError, DamagedError, EnvironmentUnfit
from dtt.config.data import GivenTokenizerConfig
from dtt.data.text import encoder as encoders
from dtt.data.text.encoder import Encoder, Gigatoken
from dtt.data.text.tokenizer import given_tokenizer

TEXTS = [f"def function_{i}(x):\n    return {i} * x + {i * i}\n" for i in range(200)]
STRANGE = [
    "",
    " ",
    "\x00",
    "naïve café",
    "日本語 टेक्स्ट 🤗🤗",
    "a\r\n\tb   c",
    "\ufeffx",
    "123456789",
]
KNOWN = ["gpt2", "dolma2", "gpt-neox-20b", "mistral-v1", "qwen"]


def utf8(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def train(special_tokens: tuple[str, ...] = ("<|endoftext|>",)) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special_tokens), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return str(tokenizer.to_str()).encode()


@pytest.fixture(scope="module")
def content() -> bytes:
    return train()


def test_an_end_of_document_that_is_not_marked_special_is_safe_too(content: bytes) -> None:
    tokens = json.loads(content)["added_tokens"]
    tokens[0]["special"] = False
    encoder = Encoder(altered(content, added_tokens=tokens), None, "here")
    ids, _ = encoder.encode([b"a<|endoftext|>b"])
    assert (ids == encoder.end_of_document).sum() == 1


def test_truncation_and_padding_of_a_given_tokenizer_are_switched_off(content: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    encoder = Encoder(tokenizer.to_str().encode(), None, "here")
    plain = Encoder(content, None, "here")
    for ours, expected in zip(encoder.encode(utf8(TEXTS)), plain.encode(utf8(TEXTS)), strict=True):
        assert ours.tolist() == expected.tolist()


def test_ids_are_those_of_tokenizers(content: bytes) -> None:
    reference = Tokenizer.from_buffer(content)
    ids, lengths = Encoder(content, None, "here").encode(utf8(TEXTS))
    expected = [[*reference.encode(t, add_special_tokens=False).ids, 0] for t in TEXTS]
    assert ids.tolist() == [i for document in expected for i in document]
    assert lengths.tolist() == [len(document) for document in expected]


@pytest.mark.parametrize("name", KNOWN)
def test_the_end_of_document_of_known_tokenizers_is_found(shared: Path, name: str) -> None:
    cfg = GivenTokenizerConfig(path=str(shared / "data/tokenizers" / name))
    encoder = Encoder(given_tokenizer(cfg), None, name)
    expected = "</s>" if name == "mistral-v1" else "<|endoftext|>"
    assert encoder.end_of_document_token == expected


def test_a_missing_end_of_document_is_reported_with_what_there_is(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"no <\|eot\|>.*\n.*\n.*<\|endoftext\|>"):
        Encoder(content, "<|eot|>", "here")
    with pytest.raises(ConfigError, match="end_of_document="):
        Encoder(train(special_tokens=("<X>",)), None, "here")


@pytest.mark.parametrize("broken", [b"", b"{}", b"not json", b'{"model": 1}', b"\xff\xfe"])
def test_a_file_that_is_not_a_tokenizer_is_refused(broken: bytes) -> None:
    with pytest.raises(DamagedError, match=r"not a tokenizer\.json"):
        Encoder(broken, None, "here")


def altered(content: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(content) | changes).encode()


# ---- the fast engine -----------------------------------------------------------------------------

Both = Callable[[str], tuple[Encoder, Encoder]]


@pytest.fixture(scope="module")
def both(shared: Path) -> Both:
    """A known tokenizer with the fast engine, and with the slow one."""
    made: dict[str, tuple[Encoder, Encoder]] = {}

    def open_both(name: str) -> tuple[Encoder, Encoder]:
        if name not in made:
            found = given_tokenizer(
                GivenTokenizerConfig(path=str(shared / "data/tokenizers" / name))
            )
            made[name] = (
                Encoder(found, None, name, "gigatoken"),
                Encoder(found, None, name, "hf"),
            )
            assert [encoder.engine for encoder in made[name]] == ["gigatoken", "hf"]
        return made[name]

    return open_both


def assert_equal(encoders: tuple[Encoder, Encoder], texts: list[str]) -> None:
    fast, slow = (encoder.encode(utf8(texts)) for encoder in encoders)
    ends = np.cumsum(slow[1])
    for text, start, end in zip(texts, [0, *ends.tolist()], ends.tolist(), strict=False):
        assert fast[0][start:end].tolist() == slow[0][start:end].tolist(), ascii(text)
    assert fast[1].tolist() == slow[1].tolist()


FRAGMENTS = [
    "<|endoftext|>", "<|im_start|>", "<s>", "</s>", "<unk>", "<|", "|||EMAIL_ADDRESS|||", " ",
    "  ", " " * 25, "\n", "\r\n", "\t", "\u00a0", "'s", "'LL", "’t", "0", "1234", "the", "▁",
    "\u0301", "\u0327", "\u0899", "\u1acf", "\U0001e4ee", "\U00010efd", "\u212b", "\u0915\u093c",
    "é", "ß", "字", "한", "\u1112\u1161", "🤗", "\u200d", "\ufe0f", "\x00", "\U00020001",
    "\ua7ce", "\U00010940", "\U000323b0",
]  # fmt: skip
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ANY_TEXT = st.lists(st.sampled_from(FRAGMENTS) | CHARACTERS, max_size=12).map("".join)


@pytest.mark.slow(except_for=["gpt2"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_fast_engine_gives_the_same_ids_for_any_text(both: Both, name: str) -> None:
    @settings(max_examples=75)
    @given(st.lists(ANY_TEXT, max_size=8))
    def same(texts: list[str]) -> None:
        assert_equal(both(name), texts)

    same()


@pytest.mark.slow(except_for=["gpt2"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_fast_engine_classes_every_kind_of_character_alike(both: Both, name: str) -> None:
    assert len(characters_of_every_kind()) > 8_000
    assert_equal(
        both(name), [f"a{c}b {c} 1{c}2\n{c}'s e{c}\u0301" for c in characters_of_every_kind()]
    )


@cache
def characters_of_every_kind() -> list[str]:
    """Return the edges of every run of one category, all that combine, and 1 in 400 of all."""
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    kinds = [unicodedata.category(character) for character in every]
    edges = {i + k for i in range(len(every) - 1) if kinds[i] != kinds[i + 1] for k in (0, 1)}
    marks = {i for i, kind in enumerate(kinds) if kind.startswith("M")}
    some = set(random.Random(0).sample(range(len(every)), len(every) // 400))
    return [every[i] for i in sorted(edges | marks | some)]


def test_the_cache_of_the_fast_engine_is_renewed_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(encoders, "CACHED_BYTES", 1000)
    opened = []
    new = Gigatoken._open
    monkeypatch.setattr(Gigatoken, "_open", lambda g: opened.append(1) or new(g))
    fast, slow = Encoder(content, None, "here", "auto"), Encoder(content, None, "here")
    for i in range(0, len(TEXTS), 10):
        assert_equal((fast, slow), TEXTS[i : i + 10])
    assert len(opened) > 5


def test_very_long_documents_are_left_to_the_slow_engine_if_the_fast_one_holds_the_gil(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "LONGEST", 20)
    content = (shared / "data/tokenizers/mistral-v1/tokenizer.json").read_bytes()
    encoder = Encoder(content, None, "here", "gigatoken")
    left: list[bytes] = []
    exact = encoder._exact
    assert encoder._fast is not None
    encoder._fast._exact = lambda documents: left.extend(documents) or exact(documents)
    assert_equal((encoder, Encoder(content, None, "here")), ["x" * 30, "short", "x" * 10])
    assert left == [b"x" * 30]


def test_other_threads_continue_while_it_encodes(both: Both) -> None:
    """So a rank can give its signs of life whatever a document takes."""
    fast, _ = both("gpt2")
    document = b" ".join(b"%d" % (i * i) for i in range(300_000))

    def turns() -> int:
        encoding = threading.Thread(target=fast.encode, args=([document],))
        encoding.start()
        count = 0
        while encoding.is_alive():
            count += 1
            threading.Event().wait(0.001)
        return count

    # One or two, if it kept Python's lock; but also if this thread waits for a core.
    assert any(turns() > 5 for _ in range(20))


@pytest.mark.parametrize("flag", [{"special": False}, {"lstrip": True}, {"rstrip": True}])
def test_an_end_of_document_that_takes_spaces_or_is_not_special_ends_documents_in_a_row(
    content: bytes, flag: dict[str, bool]
) -> None:
    tokens = [token | flag for token in json.loads(content)["added_tokens"]]
    changed = altered(content, added_tokens=tokens)
    fast, slow = Encoder(changed, None, "here", "gigatoken"), Encoder(changed, None, "here")
    spaces = ["  a  ", " b\n", "\n c <|endoftext|> d ", ""]
    assert fast.engine_problem(utf8(spaces)) is None
    assert_equal((fast, slow), spaces)


def test_an_engine_that_differs_is_not_used_and_the_reason_is_reported(
    content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = altered(content, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True})
    new = Gigatoken._open

    def open_other(engine: Gigatoken) -> Any:
        engine._content = other
        return new(engine)

    monkeypatch.setattr(Gigatoken, "_open", open_other)
    encoder = Encoder(content, None, "here", "auto")
    engine_problem = encoder.engine_problem([b"some text"])
    assert engine_problem == "gigatoken returns different ids for 'some text'"
    with caplog.at_level(logging.INFO, "dtt"):
        encoder.choose_engine(engine_problem)
    assert engine_problem in caplog.text
    assert encoder.engine == "hf"
    assert_equal((encoder, Encoder(content, None, "here")), STRANGE)
    with pytest.raises(EnvironmentUnfit, match="returns different ids"):
        Encoder(content, None, "here", "gigatoken").choose_engine(engine_problem)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "not .*Lowercase"),
        ({"normalizer": {"type": "NFKC"}}, "not .*NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "does not support|different ids"),
    ],
)
def test_tokenizers_it_may_interpret_differently_are_left_to_the_slow_engine(
    content: bytes, change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed = altered(content, **change)
    encoder = Encoder(changed, None, "here", "auto")
    with caplog.at_level(logging.INFO, "dtt"):
        encoder.choose_engine(encoder.engine_problem([]))
    assert encoder.engine == "hf"
    assert re.search(why, caplog.text)
    assert_equal((encoder, Encoder(changed, None, "here")), ["SOME Text", *TEXTS[:5]])


def test_without_gigatoken_the_slow_engine_encodes(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder = Encoder(content, None, "here", "auto")
    engine_problem = encoder.engine_problem([])
    assert engine_problem is not None
    assert "not installed" in engine_problem
    encoder.choose_engine(engine_problem)
    assert encoder.engine == "hf"
    assert_equal((encoder, Encoder(content, None, "here")), STRANGE)
