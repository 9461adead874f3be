"""Tokenizers are byte-level, the same every time, and never let a text end its own document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.data.tokenizer import PATTERNS, Encoder, given_tokenizer, train_tokenizer
from dtt.errors import ConfigError, DamagedError, InputError

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


def train(**options: Any) -> bytes:
    cfg = TrainedTokenizerConfig(**({"vocab_size": 400} | options))
    return train_tokenizer(cfg, iter([TEXTS[:100], TEXTS[100:]])).encode()


@pytest.fixture(scope="module")
def content() -> bytes:
    return train()


def test_any_text_comes_back(content: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(content)
    encoder = Encoder(content, "<|endoftext|>", "here")
    ids, lengths = encoder.encode(STRANGE)
    start = 0
    for text, length in zip(STRANGE, lengths.tolist(), strict=True):
        assert tokenizer.decode(ids[start : start + length - 1].tolist()) == text
        assert ids[start + length - 1] == encoder.end_of_document
        start += length


def test_special_tokens_come_first_then_bytes_then_merges() -> None:
    content = train(special_tokens=("<eos>", "<pad>"))
    vocabulary = Tokenizer.from_buffer(content).get_vocab()
    assert vocabulary["<eos>"] == 0
    assert vocabulary["<pad>"] == 1
    assert len(vocabulary) == 400 == max(vocabulary.values()) + 1
    assert all(len(token) == 1 for token, i in vocabulary.items() if 2 <= i < 258)


def test_the_number_of_threads_does_not_change_the_tokenizer(content: bytes) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tokenizer import train
sys.stdout.buffer.write(train())
"""
    for threads in ("1", "4"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
        assert run.stdout == content


def test_a_text_too_small_for_the_vocabulary_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cfg = TrainedTokenizerConfig(vocab_size=5000)
    content = train_tokenizer(cfg, iter([["abc abc abc"]])).encode()
    assert "not 5000" in caplog.text
    assert Encoder(content, None, "here").vocab_size < 300


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt2", ["I", "'ll", " pay", " 12345", " DON", "'", "T"]),
        ("llama3", ["I", "'ll", " pay", " ", "123", "45", " DON", "'T"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " DON", "'T"]),
    ],
)
def test_pre_tokenizers_split_as_published(name: Any, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_buffer(train(pre_tokenizer=name))
    split = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345 DON'T")
    assert [piece.replace("Ġ", " ") for piece, _ in split] == pieces


def test_patterns_are_those_of_published_tokenizers(shared: Path) -> None:
    for name, file in (("llama3", "dolma2"), ("qwen2", "qwen")):
        path = shared / "data/tokenizers" / file / "tokenizer.json"
        published = json.loads(path.read_bytes())["pre_tokenizer"]
        patterns = [part["pattern"]["Regex"] for part in published["pretokenizers"][:1]]
        assert patterns == [PATTERNS[name]]


def test_no_text_can_hold_the_end_of_document(content: bytes) -> None:
    encoder = Encoder(content, None, "here")
    ids, lengths = encoder.encode(["a<|endoftext|>b", "<|endoftext|>"])
    assert (ids == encoder.end_of_document).sum() == 2
    assert lengths.sum() == len(ids)


def altered(content: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(content) | changes).encode()


def test_an_end_of_document_that_is_not_marked_special_is_safe_too(content: bytes) -> None:
    tokens = json.loads(content)["added_tokens"]
    tokens[0]["special"] = False
    encoder = Encoder(altered(content, added_tokens=tokens), None, "here")
    ids, _ = encoder.encode(["a<|endoftext|>b"])
    assert (ids == encoder.end_of_document).sum() == 1


def test_truncation_and_padding_of_a_given_tokenizer_are_switched_off(content: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    encoder = Encoder(tokenizer.to_str().encode(), None, "here")
    plain = Encoder(content, None, "here")
    for given, expected in zip(encoder.encode(TEXTS), plain.encode(TEXTS), strict=True):
        assert given.tolist() == expected.tolist()


def test_ids_are_those_of_tokenizers(content: bytes) -> None:
    reference = Tokenizer.from_buffer(content)
    ids, lengths = Encoder(content, None, "here").encode(TEXTS)
    expected = [[*reference.encode(t, add_special_tokens=False).ids, 0] for t in TEXTS]
    assert ids.tolist() == [i for document in expected for i in document]
    assert lengths.tolist() == [len(document) for document in expected]


@pytest.mark.parametrize("name", ["gpt2", "dolma2", "gpt-neox-20b", "mistral-v1", "qwen"])
def test_the_end_of_document_of_known_tokenizers_is_found(shared: Path, name: str) -> None:
    cfg = GivenTokenizerConfig(path=str(shared / "data/tokenizers" / name))
    encoder = Encoder(given_tokenizer(cfg), None, name)
    expected = "</s>" if name == "mistral-v1" else "<|endoftext|>"
    assert encoder.end_of_document_token == expected


def test_a_missing_end_of_document_is_told_with_what_there_is(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"no <\|eot\|>.*\n.*\n.*<\|endoftext\|>"):
        Encoder(content, "<|eot|>", "here")
    with pytest.raises(ConfigError, match="end_of_document="):
        Encoder(train(special_tokens=("<X>",)), None, "here")


@pytest.mark.parametrize("broken", [b"", b"{}", b"not json", b'{"model": 1}', b"\xff\xfe"])
def test_what_is_no_tokenizer_is_refused(broken: bytes) -> None:
    with pytest.raises(DamagedError, match=r"not a tokenizer\.json"):
        Encoder(broken, None, "here")


def test_given_tokenizers_are_found_in_files_and_folders(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert given_tokenizer(GivenTokenizerConfig(path=str(path))) == content


def missing(tmp_path: Path) -> Iterator[str]:
    yield "tokenizer.json"
    yield str(tmp_path / "none.json")
    yield str(tmp_path)
    yield "./folder"


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    for path in missing(tmp_path):
        with pytest.raises(InputError, match="no tokenizer at"):
            given_tokenizer(GivenTokenizerConfig(path=path))
    with pytest.raises(InputError, match=r"there is a tokenizer\.model"):
        given_tokenizer(GivenTokenizerConfig(path=str(tmp_path)))
