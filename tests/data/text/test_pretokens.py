"""Counts of pre-tokens are what the pre-tokenizers find in whole texts, whoever counts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtt.config.data import TrainedTokenizerConfig
from dtt.data.corpus.document_sampling import tokenizer_sample
from dtt.data.corpus.units import Corpus
from dtt.data.text import pretokens
from dtt.data.text.pretokens import count_pre_tokens, pre_tokenizer
from dtt.data.text.tokenizer import train_tokenizer
from dtt.mesh.comm import Serial

NAMES = ["gpt2", "llama3", "qwen2"]


def counted(name: str, *batches: list[str]) -> Counter[str]:
    return count_pre_tokens(name, [[text.encode() for text in batch] for batch in batches])


def by_hugging_face(name: str, texts: list[str]) -> Counter[str]:
    """Each whole text through the regular expression."""
    split = pre_tokenizer(name).pre_tokenize_str
    return Counter(piece for text in texts for piece, _ in split(text))


# What patterns treat apart: letters, digits, marks, white space of all kinds, beyond ASCII, too.
LETTERS = [*"abstDMREVL", "é", "字", "ſ", "ß", "Ⅷ", "ª", "ـ"]
OTHERS = [
    *"019'’.,!-_ \t\r\n\x00\x0b\x1c\x85\u00a0\u2028\u3000\u200b\ufeff\u0301½٣",
    *("🤗", "👍🏽", "<|endoftext|>", "  ", "\n\n", "\r\n", " \n", "'ll"),
]
TEXTS = st.lists(st.sampled_from(LETTERS + 2 * OTHERS), max_size=40).map("".join)


@settings(max_examples=1500, deadline=None)
@given(name=st.sampled_from(NAMES), texts=st.lists(TEXTS | st.text(max_size=30), max_size=3))
def test_any_text_is_counted_as_its_pre_tokenizer_splits_it(name: str, texts: list[str]) -> None:
    assert counted(name, texts) == by_hugging_face(name, texts)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_and_triple_of_ascii_is_counted_as_it_is_split(name: str) -> None:
    """Whether two bytes are cut apart depends on at most one more."""
    whole = [chr(i) + chr(j) for i in range(128) for j in range(128)]
    kinds = "aD9'. \t\r\n\x00é½\u00a0\u0301🤗"
    whole += [a + b + c for a in kinds for b in kinds for c in kinds]
    around = [f"{before}{text}{after}" for text in whole for before, after in ("xx", "  ", "..")]
    assert counted(name, whole, around) == by_hugging_face(name, whole + around)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["web/c4_sample.jsonl", "sft/glaive_tools.jsonl"])
def test_real_text_is_counted_as_it_is_split(shared: Path, name: str, file: str) -> None:
    lines = (shared / "data" / file).read_text().splitlines()  # JSON: quotes, brackets, escapes
    assert counted(name, lines) == by_hugging_face(name, lines)


def test_pieces_that_do_not_fit_are_split_early(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[f"字{i}字 the {i % 7} words"] for i in range(50)]
    monkeypatch.setattr(pretokens, "HELD_CHARACTERS", 100)
    expected = by_hugging_face("gpt2", [text for batch in batches for text in batch])
    assert counted("gpt2", *batches) == expected


def test_a_piece_that_takes_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokens, "LONGEST_PIECE", 4)
    expected = by_hugging_face("gpt2", ["字字字字", "字字字字", "字字"])
    assert counted("gpt2", ["字" * 10]) == expected


# ---- many ranks ----------------------------------------------------------------------------------

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="no mpirun or no mpi4py: pip install -e '.[mpich]'",
)


class OneOf(Serial):
    """A rank that hears of no other."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture
def corpus(corpora: Any) -> Corpus:
    texts = [f"{i} words, {i * i} more and {'so on ' * (i % 40)}" for i in range(2000)]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    made: Corpus = corpora.make({"a.jsonl": lines})
    return made


def sample(corpus: Corpus, rank: int, size: int, train_bytes: int) -> list[bytes]:
    units = corpus.units(20_000)
    comm = OneOf(rank, size)
    batches = tokenizer_sample(corpus, units, train_bytes, 0.1, comm, lambda amount: None)
    return [text for batch in batches for text in batch]


@pytest.mark.parametrize("train_bytes", [1, 50_000, 10**9])
def test_ranks_together_learn_from_the_same_text_as_one(corpus: Corpus, train_bytes: int) -> None:
    alone = sample(corpus, 0, 1, train_bytes)
    for size in (2, 3, 100):
        together = [
            text for rank in range(size) for text in sample(corpus, rank, size, train_bytes)
        ]
        assert sorted(together) == sorted(alone)
    taken = sum(map(len, alone))
    assert taken <= 3 * train_bytes or train_bytes == 1
    assert taken >= min(train_bytes, 0.7 * sum(unit.text_bytes for unit in corpus.units(20_000)))


@needs_mpi
def test_any_number_of_ranks_learns_the_same_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    assert MPIRUN is not None
    cfg = TrainedTokenizerConfig(vocab_size=400, pre_tokenizer="llama3", train_bytes=100_000)
    texts = [text.decode() for text in sample(corpus, 0, 1, cfg.train_bytes)]
    counts = by_hugging_face("llama3", texts)
    expected = train_tokenizer(cfg, counts)
    for ranks in (1, 2, 3):
        out = tmp_path / f"out{ranks}"
        command = [
            *(MPIRUN, "-n", str(ranks), sys.executable, "-m", "dtt.main", "tokenize"),
            *(f"download.out={corpus.folder}", f"tokenize.out={out}"),
            *("tokenize.validation_fraction=0.1", "tokenize.unit_bytes=20000"),
            *(f"tokenizer.{key}={value}" for key, value in cfg.model_dump().items()
              if key in ("vocab_size", "pre_tokenizer", "train_bytes")),
        ]  # fmt: skip
        subprocess.run(command, capture_output=True, timeout=60, check=True)
        assert (out / "tokenizer.json").read_text() == expected
        assert not [*(out / ".units").glob(".pre-tokens*")]
