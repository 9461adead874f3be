"""The contract of a source of samples, on a toy and on every real source."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.conversation_files import write_tokenizer
from support.own_classes import NUMBERS, ROWS
from support.token_files import random_documents, row, write_conversations, write_folder
from torch import Tensor

from dtt.base.targets import IGNORE_INDEX
from dtt.config.data import DownloadConfig, TrainedTokenizerConfig
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.sources import SourceConfig
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.encoded_documents import CorpusDocuments
from dtt.data.samples.loader import Batch, BatchReader, training_batches
from dtt.data.samples.protocol import Counts, DocumentSpan, SampleNumbers, SampleRows, Streamed
from dtt.data.samples.protocol import SampleSource as Source
from dtt.data.samples.synthetic_source import SyntheticSource
from dtt.data.samples.text_source import HeldOutText, TextSource
from dtt.data.samples.token_source import TokenSource
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import train_tokenizer
from dtt.evaluate.validation import Evaluator, held_out
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import Passes

SEQ_LEN, CPU = 32, torch.device("cpu")


class EveryThird:
    """A toy: of the numbers from 0 to 255, every third is a target. Implements Source."""

    name, bytes_per_token = "toy", 1.0

    def __init__(self, samples: int = 40, seq_len: int = SEQ_LEN) -> None:
        self._samples, self._seq_len = samples, seq_len
        self.tokens = samples * (seq_len + 1)

    def __len__(self) -> int:
        return self._samples

    def order(self, first: int, count: int) -> SampleNumbers:
        return (7 * np.arange(first, first + count, dtype=np.uint64)) % np.uint64(len(self))

    def read(self, samples: SampleNumbers) -> SampleRows:
        ids = (samples[:, None] * 5 + np.arange(self._seq_len + 1)).astype(np.int64) % 256
        return SampleRows(ids, np.where(ids[:, 1:] % 3 == 0, ids[:, 1:], IGNORE_INDEX))

    def counts(self, samples: SampleNumbers) -> Counts:
        # 256 is no multiple of 3, so the numbers are counted one by one.
        targets = int((self.read(samples).targets != IGNORE_INDEX).sum())
        return Counts(targets, targets, len(samples) * (self._seq_len + 1))

    def origin(self, sample: int) -> list[DocumentSpan]:
        return [DocumentSpan(Path("numbers"), sample, 0, 0, self._seq_len + 1)]


def of_text(folder: Path) -> tuple[CorpusDocuments, dict[str, Any], Encoder]:
    texts = [f"{i}: " + "one two three " * (i % 9) for i in range(600)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl").write_text(lines)
    download(DownloadConfig(dataset=str(folder / "a.jsonl")), folder / "corpus")
    content = train_tokenizer(TrainedTokenizerConfig(vocab_size=300), [texts]).encode()
    options = {"seq_len": SEQ_LEN, "validation_fraction": 0.2}
    return CorpusDocuments(Corpus(folder / "corpus")), options, Encoder(content, None, "here")


def text(folder: Path, *, eod: bool = False) -> Source:
    documents, options, encoder = of_text(folder)
    return TextSource(documents, encoder, **options, seed=1, eod_mask_loss=eod)


def held_out_text(folder: Path) -> Source:
    documents, options, encoder = of_text(folder)
    return HeldOutText(documents, encoder, **options, text_bytes=10**6)


def token_files(folder: Path, **options: Any) -> Source:
    shards = {f"train-{i}": random_documents(40, 50, seed=i) for i in range(3)}
    write_folder(folder, shards)
    cfg = SourceConfig(path=folder, name="x")
    return TokenSource(cfg, "train", seq_len=SEQ_LEN, seed=0, **options)


def raw_ids(folder: Path) -> Source:
    row(random_documents(90, 50)).astype(np.uint16).tofile(folder / "a.bin")
    cfg = SourceConfig(path=folder / "a.bin", name="x")
    return TokenSource(cfg, "train", seq_len=SEQ_LEN, seed=0, end_of_document=0)


def conversations(folder: Path, *, pairs: bool = False) -> Source:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 15, size=(2, 60))
    # The first third asks, the rest answers.
    shards = [
        [([*rng.integers(1, 99, n)], [i > n // 3 for i in range(n)]) for n in one]
        for one in lengths.tolist()
    ]
    write_conversations(folder, shards, pairs=pairs)
    return TokenSource(SourceConfig(path=folder, name="x"), "train", seq_len=SEQ_LEN, seed=0)


def own(folder: Path, code: str, name: str) -> Source:
    """A class of a user's own."""
    (folder / "mine.py").write_text(code)
    tokenizer = f"{write_tokenizer(folder).path}/tokenizer.json"
    keys = [f"data.type=mine.py:{name}", f"data.tokenizer={tokenizer}", f"train.seq_len={SEQ_LEN}"]
    with chdir(folder):
        return open_dataset(resolve(None, [*keys, "train.steps=1"], env={}).config).sources[0]


SOURCES: dict[str, Callable[[Path], Source]] = {
    "toy": lambda folder: EveryThird(),
    "own samples": lambda folder: own(folder, NUMBERS, "Numbers"),
    "own rows": lambda folder: own(folder, ROWS.replace("GIVEN", "'row ' * (1 + row)"), "Mine"),
    "synthetic": lambda folder: SyntheticSource(300, SEQ_LEN, 0),
    "windows": token_files,
    "windows, eod": lambda folder: token_files(folder, eod_mask_loss=True),
    "best-fit": lambda folder: token_files(folder, packing="best-fit"),
    "best-fit, eod": lambda folder: token_files(folder, packing="best-fit", eod_mask_loss=True),
    "raw ids": raw_ids,
    "conversations": conversations,
    "pairs": lambda folder: conversations(folder, pairs=True),
    "text": text,
    "text, eod": lambda folder: text(folder, eod=True),
    "held-out text": held_out_text,
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return SOURCES[request.param](tmp_path_factory.mktemp("source"))


def some(source: Source) -> SampleNumbers:
    """The first samples in order, without repetition."""
    return source.order(0, min(60, len(source)))


def test_counts_are_those_of_what_is_read(source: Source) -> None:
    for samples in (some(source), some(source)[3:4], some(source)[:0]):
        rows, counts = source.read(samples), source.counts(samples)
        assert counts.targets == (rows.targets != IGNORE_INDEX).sum()
        assert counts.tokens == (rows.ids != IGNORE_INDEX).sum()
        if counts.terms != counts.targets:
            assert rows.doc_ids is not None
            documents = np.where(rows.ids == IGNORE_INDEX, -1, rows.doc_ids)
            assert 2 * counts.terms == (documents.max(axis=1, initial=-1) + 1).sum()


def test_targets_are_some_of_the_tokens_that_follow(source: Source) -> None:
    rows = source.read(some(source))
    assert rows.ids.shape == (len(some(source)), SEQ_LEN + 1)
    is_target = rows.targets != IGNORE_INDEX
    assert is_target.any()
    assert np.array_equal(rows.targets[is_target], rows.ids[:, 1:][is_target])


def test_spans_cover_the_tokens_and_documents_are_numbered_as_they_follow(source: Source) -> None:
    samples = some(source)[:20]
    rows = source.read(samples)
    for i, sample in enumerate(samples.tolist()):
        spans = source.origin(sample)
        bounds = [0, *(span.stop for span in spans)]
        assert [span.start for span in spans] == bounds[:-1]
        assert bounds[-1] == (rows.ids[i] != IGNORE_INDEX).sum()
        assert (rows.ids[i, bounds[-1] :] == IGNORE_INDEX).all()
        if rows.doc_ids is not None:
            for number, span in enumerate(spans):
                assert set(rows.doc_ids[i, span.start : span.stop].tolist()) == {number}


def test_the_order_is_a_permutation_that_does_not_depend_on_the_pieces(source: Source) -> None:
    # Half of a streamed source: its length is an estimate.
    count = len(source) // 2 if isinstance(source, Streamed) else min(len(source), 500)
    samples = source.order(0, count)
    assert len(np.unique(samples)) == count
    if not isinstance(source, Streamed) and count < 500:
        assert sorted(samples.tolist()) == list(range(count))
    parts = [source.order(first, min(7, count - first)) for first in range(0, count, 7)]
    assert np.array_equal(np.concatenate(parts), samples)
    rows = source.read(samples)
    assert np.array_equal(source.read(samples[::-1]).ids, rows.ids[::-1])


# ---- a source with masked targets, from the loader to the gradients ------------------------------


@pytest.fixture
def mixed(tokens: Path) -> Dataset:
    """A mixture of token files and the toy."""
    lengths = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={8 * SEQ_LEN}")
    sources = f"data.sources=[{{name: a, path: {tokens}}}, {{name: toy, path: {tokens}}}]"
    cfg = resolve(None, [*lengths, "train.steps=30", sources]).config
    dataset = open_dataset(cfg)
    return replace(dataset, sources=(dataset.sources[0], EveryThird(len(dataset.sources[1]))))


def model() -> Decoder:
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2)
    decoder = Decoder(families.get(cfg.family).architecture(cfg, 300, SEQ_LEN))
    initialize(decoder, seed=0)
    return decoder


def targets(batch: Batch) -> Tensor:
    return torch.cat([micro_batch.targets for micro_batch in batch.micro_batches])


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_counts_the_targets_of_all_ranks(mixed: Dataset, size: int) -> None:
    ranks = [training_batches(mixed, BatchReader(rank, size, 3, CPU), 0) for rank in range(size)]
    for parts in zip(*ranks, strict=True):
        count = sum(int((targets(part) != IGNORE_INDEX).sum()) for part in parts)
        assert {part.targets for part in parts} == {count}
        assert count < 8 * SEQ_LEN


def test_loss_and_gradients_are_those_of_the_unmasked_targets_alone(mixed: Dataset) -> None:
    decoder = model()
    batch = next(training_batches(mixed, BatchReader(0, 1, 3, CPU), 0))
    kept = [micro_batch.targets != IGNORE_INDEX for micro_batch in batch.micro_batches]
    for micro_batch in batch.micro_batches:
        (decoder(micro_batch.tokens, micro_batch.targets).loss / batch.targets).backward()
    gradients = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    for micro_batch, here in zip(batch.micro_batches, kept, strict=True):
        logits = decoder(micro_batch.tokens)[here]
        loss = F.cross_entropy(logits, micro_batch.targets[here], reduction="sum")
        (loss / sum(int(one.sum()) for one in kept)).backward()
    assert gradients
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


class Nothing(EveryThird):
    """A source without any target."""

    def read(self, samples: SampleNumbers) -> SampleRows:
        rows = super().read(samples)
        return replace(rows, targets=np.full_like(rows.targets, IGNORE_INDEX))


def test_validation_measures_the_targets_and_leaves_out_sources_without_any(
    mixed: Dataset,
) -> None:
    toy = EveryThird()
    dataset = replace(mixed, validation=(Nothing(), toy))
    parts = held_out(dataset, 2 * len(toy))
    assert [part.source for part in parts] == [toy]
    decoder = model()
    measure = partial(Passes(decoder, "fp32").evaluate, loss_function=loss_function())
    reader = BatchReader(0, 1, 4, CPU)
    record = Evaluator(parts, reader, decoder, measure).record(1, lambda: False)
    assert record is not None
    rows = toy.read(np.arange(len(toy), dtype=np.uint64))
    kept = torch.from_numpy(rows.targets != IGNORE_INDEX)
    with torch.no_grad():
        logits = decoder(torch.from_numpy(rows.ids[:, :-1]))
    expected = F.cross_entropy(logits[kept], torch.from_numpy(rows.targets)[kept])
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-5)
