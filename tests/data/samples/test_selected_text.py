"""Training from text reads a corpus as if the documents of its selection had been deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import comma_separated, json_lines, parquet
from support.selections import CLEAN, is_third, write_selection
from tokenizers import Tokenizer

from dtt.config.clean import CleanConfig
from dtt.config.data import TrainedTokenizerConfig
from dtt.config.load import resolve
from dtt.data.corpus.units import Corpus
from dtt.data.samples import encoded_documents, text_source
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.encoded_documents import CorpusDocuments
from dtt.data.samples.text_source import HeldOutText, TextSource
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "sleeping", "dog"]
TEXTS = [
    f"{i}: " + " ".join(WORDS[(i * 7 + j * j) % 10] for j in range(5 + i * i % 90))
    for i in range(600)
]
OPTIONS: dict[str, Any] = {"seq_len": 16, "validation_fraction": 0.1}


KEPT = [text for text in TEXTS if not is_third(text.encode())]


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TrainedTokenizerConfig(vocab_size=300), [TEXTS])


@pytest.fixture(scope="module")
def encoder(tokenizer: str) -> Encoder:
    return Encoder(tokenizer.encode(), None, "here")


def make(corpora: Any, folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    corpora.folder = folder
    made: Corpus = corpora.make(files)
    return made.folder


def samples(corpus: Corpus, encoder: Encoder) -> dict[str, Any]:
    """The ids of two epochs in order, and those of the held-out text."""
    documents = CorpusDocuments(corpus)
    source = TextSource(documents, encoder, seed=1, **OPTIONS)
    place, ids = 0, []
    while source.state(place)["epoch"] < 2:
        ids.append(source.read(source.order(place, 1)).ids)
        place += 1
    held_out = HeldOutText(documents, encoder, text_bytes=10**6, **OPTIONS)
    row = held_out.read(held_out.order(0, len(held_out))).ids
    return {"train": np.concatenate(ids).tolist(), "held out": row.tolist()}


@pytest.mark.parametrize(
    ("suffix", "write", "unit_bytes"),
    [
        ("jsonl", json_lines, 16_000_000),
        ("parquet", parquet, 16_000_000),
        ("csv", comma_separated, 16_000_000),
        ("csv", comma_separated, 1),
    ],
)
def test_samples_are_those_of_the_corpus_without_removed_documents(
    corpora: Any,
    tmp_path: Path,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    write: Callable[[list[str]], bytes],
    unit_bytes: int,
) -> None:
    """With units of one byte each CSV file is a unit; else all files are one, of several parts."""
    monkeypatch.setattr(text_source, "PART_BYTES", 10_000)
    monkeypatch.setattr(encoded_documents, "UNIT_BYTES", unit_bytes)
    folders = []
    for name, is_kept in (("whole", lambda text: True), ("deleted", KEPT.__contains__)):
        halves = {"a": TEXTS[:300], "b": TEXTS[300:]}
        files = {f"{n}.{suffix}": write([*filter(is_kept, h)]) for n, h in halves.items()}
        folders.append(make(corpora, tmp_path / name, files))
    whole, deleted = folders
    write_selection(whole, is_third, unit_bytes=unit_bytes)
    # Another constant has no effect: the units are the selection's.
    expected = samples(Corpus(deleted), encoder)
    monkeypatch.setattr(encoded_documents, "UNIT_BYTES", 3_000)
    corpus = Corpus(whole, clean=CLEAN)
    assert samples(corpus, encoder) == expected
    assert len(expected["train"]) > 500
    assert expected["held out"]
    source = TextSource(CorpusDocuments(corpus), encoder, seed=1, **OPTIONS)
    plain = TextSource(CorpusDocuments(Corpus(deleted)), encoder, seed=1, **OPTIONS)
    assert source.tokens == pytest.approx(plain.tokens, rel=0.05)


def test_a_document_keeps_its_number_in_the_file(
    corpora: Any, tmp_path: Path, encoder: Encoder, tokenizer: str
) -> None:
    decode = Tokenizer.from_str(tokenizer).decode
    folder = make(corpora, tmp_path / "whole", {"a.jsonl": json_lines(TEXTS)})
    write_selection(folder, is_third, unit_bytes=5_000)
    documents = CorpusDocuments(Corpus(folder, clean=CLEAN))
    assert len(documents.units) > 5
    source = TextSource(documents, encoder, seed=1, **OPTIONS)
    for sample in source.order(0, 40)[::10].tolist():
        ids = source.read(np.array([sample], dtype=np.uint64)).ids[0]
        for span in source.origin(sample):
            text = decode(ids[span.start : span.stop - 1].tolist())
            assert TEXTS[span.document] in KEPT
            assert text in TEXTS[span.document]


def test_a_run_reads_the_kept_documents_only_which_are_other_data(
    corpora: Any, tmp_path: Path, tokenizer: str
) -> None:
    whole = make(corpora, tmp_path / "whole", {"a.jsonl": json_lines(TEXTS)})
    deleted = make(corpora, tmp_path / "deleted", {"a.jsonl": json_lines(KEPT)})
    write_selection(whole, is_third, unit_bytes=encoded_documents.UNIT_BYTES)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer)

    def opened(corpus: Path, *more: str) -> tuple[str, list[list[int]]]:
        given = ["data.type=text", f"download.out={corpus}", f"tokenizer.path={path}", *more]
        sizes = ["train.seq_len=32", "train.global_batch_tokens=256", "train.steps=6"]
        cfg = resolve(None, ["tokenizer.type=file", *given, *sizes], env={}).config
        dataset = open_dataset(cfg)
        return dataset.manifest.key, dataset.read(dataset.order(0, 48)).ids.tolist()

    key, rows = opened(whole, "clean.exact=true")
    assert rows == opened(deleted)[1]
    assert rows != opened(whole)[1]
    assert key != opened(whole)[0]


def test_the_data_key_depends_on_what_is_removed_only(
    corpora: Any, tmp_path: Path, encoder: Encoder
) -> None:
    folder = make(corpora, tmp_path / "whole", {"a.jsonl": json_lines(TEXTS)})
    other = CleanConfig(exact=False)
    size = encoded_documents.UNIT_BYTES

    def identity(clean: CleanConfig | None) -> dict[str, Any]:
        documents = CorpusDocuments(Corpus(folder, clean=clean))
        return TextSource(documents, encoder, seed=1, **OPTIONS).identity

    before = identity(None)
    assert "removed" not in before
    write_selection(folder, lambda text: False, unit_bytes=size)
    assert identity(CLEAN) == before
    write_selection(folder, is_third, unit_bytes=size)
    first = identity(CLEAN)
    assert first != before
    write_selection(folder, is_third, unit_bytes=size, clean=other)
    assert identity(other) == first
    write_selection(folder, lambda text: text.startswith(b"3:"), unit_bytes=size, clean=other)
    assert identity(other) not in (first, before)
