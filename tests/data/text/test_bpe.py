"""Merges are those of Hugging Face's trainer, and right where its 32 bits are not enough."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.config.data import TrainedTokenizerConfig
from dtt.data.text.bpe import Learnt, learn
from dtt.data.text.pretokens import count_pre_tokens, pre_tokenizer
from dtt.data.text.tokenizer import train_tokenizer

END = "<|endoftext|>"


def by_hugging_face(splits: Any, texts: list[str], vocab_size: int, special: list[str]) -> str:
    """The tokenizer.json of `tokenizers`' own trainer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True))


def learnt_by_hugging_face(words: dict[str, int], vocab_size: int, special: list[str]) -> Learnt:
    text = " ".join(word for word, count in words.items() for _ in range(count))
    split = pre_tokenizers.WhitespaceSplit()
    model = json.loads(by_hugging_face(split, [text], vocab_size, special))["model"]
    return Learnt(model["vocab"], [tuple(merge) for merge in model["merges"]])


@st.composite
def tables(draw: st.DrawFn) -> dict[str, int]:
    """Few letters: runs of one, ties and overlaps everywhere."""
    letters = draw(st.sampled_from(["a", "ab", "abc", "abcdefgh"]))
    words = st.text(letters, min_size=1, max_size=30)
    return draw(st.dictionaries(words, st.integers(1, 5), min_size=1, max_size=12))


@settings(max_examples=300, deadline=None)
@given(words=tables(), more=st.integers(0, 60))
def test_any_words_yield_the_merges_of_hugging_face(words: dict[str, int], more: int) -> None:
    learnt = learn(words, 257 + more, [END])
    assert learnt == learnt_by_hugging_face(words, 257 + more, [END])


@settings(max_examples=200, deadline=None)
@given(
    words=tables(),
    special=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
)
def test_special_tokens_that_words_spell_too_are_treated_alike(
    words: dict[str, int], special: list[str]
) -> None:
    assert learn(words, 300, special) == learnt_by_hugging_face(words, 300, special)


def texts_of(folder: Path, name: str) -> Iterator[str]:
    """The first 5 MB of a real corpus."""
    room = 5_000_000
    for path in sorted((folder / name).glob("train*")):
        if path.suffix == ".parquet":
            texts = pq.read_table(path).column("text").to_pylist()
        else:
            lines = gzip.decompress(path.read_bytes()).splitlines()
            texts = [json.loads(line)["text"] for line in lines]
        for text in texts:
            yield text
            room -= len(text.encode())
            if room < 0:
                return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corpus", "splits"),
    [("novels", "gpt2"), ("novels", "llama3"), ("techdocs", "qwen2"), ("multilingual", "llama3")],
)
def test_tokenizers_of_real_text_are_those_of_hugging_face_byte_for_byte(
    shared: Path, corpus: str, splits: Any
) -> None:
    texts = list(texts_of(shared / "data", corpus))
    special = (END, "<|pad|>")
    cfg = TrainedTokenizerConfig(vocab_size=8000, pre_tokenizer=splits, special_tokens=special)
    ours = train_tokenizer(cfg, count_pre_tokens(splits, [[text.encode() for text in texts]]))
    assert ours == by_hugging_face(pre_tokenizer(splits), texts, 8000, list(special))


def test_counts_beyond_32_bits_are_right() -> None:
    """The same words, more often: the same merges. At 2³¹ and 2³² a 32-bit count would wrap."""
    words = {"abab": 7, "abc": 5, "bcbc": 4, "cab": 3, "aaaa": 2}
    few = learn(words, 270, [END])
    assert len(few.merges) > 5
    for factor in (2**31 // 7, 2**31, 2**32, 2**50):
        assert learn({word: factor * n for word, n in words.items()}, 270, [END]) == few


def test_the_order_of_the_words_does_not_matter() -> None:
    words = {"abab": 3, "bab": 3, "aab": 3, "bba": 3, "aaaaa": 3}
    backwards = dict(reversed(words.items()))
    assert learn(words, 300, [END]) == learn(backwards, 300, [END])


def test_without_words_the_vocabulary_has_only_bytes() -> None:
    learnt = learn({}, 300, [END])
    assert learnt.merges == []
    assert len(learnt.vocabulary) == 257
