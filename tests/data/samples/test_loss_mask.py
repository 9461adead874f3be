"""A loss mask of a source decides which tokens are targets, up to the gradients of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.base.ranks import Ranks
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.loader import Batch, BatchReader, training_batches
from dtt.data.samples.protocol import SOURCE_SHIFT, DocumentSpan, Rows, Samples
from dtt.data.samples.token_source import TokenSource
from dtt.evaluate.validation import Evaluator, held_out
from dtt.mesh import dist
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.train.step import Step, next_token

SEQ_LEN, SEQUENCES, VOCAB_SIZE = 32, 8, 300
CPU = torch.device("cpu")


class MaskedSource:
    """Token files with a loss mask for each sample. Implements the Source protocol."""

    def __init__(self, tokens: TokenSource, mask: npt.NDArray[np.bool_] | None) -> None:
        """Wrap `tokens`; `mask` is [samples, SEQ_LEN], or None to exclude no target."""
        self.name, self.tokens, self.bytes_per_token = tokens.name, tokens.tokens, 3.0
        self._source, self.mask = tokens, mask
        self.reads = 0
        every = np.arange(len(tokens), dtype=np.uint64)
        real = tokens.read(every).ids[:, 1:] != IGNORE_INDEX
        self.counts = (real if mask is None else real & mask).sum(axis=1)
        """The index: the number of targets of each sample."""

    def __len__(self) -> int:
        return len(self._source)

    def samples_at(self, first: int, count: int) -> Samples:
        return self._source.samples_at(first, count)

    def read(self, samples: Samples, *, with_doc_ids: bool = False) -> Rows:
        self.reads += 1
        rows = self._source.read(samples, with_doc_ids=with_doc_ids)
        return rows if self.mask is None else replace(rows, loss_mask=self.mask[samples])

    def targets(self, samples: Samples) -> int:
        return int(self.counts[samples].sum())

    def pairs(self, samples: Samples) -> int:
        return 0

    def tokens_in(self, samples: Samples) -> int:
        return self._source.tokens_in(samples)

    def locate(self, sample: int) -> list[DocumentSpan]:
        return self._source.locate(sample)

    def state(self, consumed: int) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass


def random_mask(samples: int) -> npt.NDArray[np.bool_]:
    """Exclude two thirds of the targets, and all of every fifth sample."""
    mask = np.random.default_rng(0).random((samples, SEQ_LEN)) < 1 / 3
    mask[::5] = False
    return mask


def config(tokens: Path, *arguments: str) -> RunConfig:
    lengths = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQUENCES * SEQ_LEN}")
    source = f"data.sources=[{{name: a, path: {tokens}}}, {{name: b, path: {tokens}}}]"
    return resolve(None, [*lengths, "train.steps=30", source, *arguments]).config


def opened(tokens: Path, mask: str, *arguments: str) -> Dataset:
    """Return a mixture; `mask` is that of its second source: none, ones or random."""
    dataset = open_dataset(config(tokens, *arguments))
    plain, other = dataset.sources
    assert isinstance(other, TokenSource)
    shape = len(other), SEQ_LEN
    masks = {"none": None, "ones": np.ones(shape, np.bool_), "random": random_mask(len(other))}
    return replace(dataset, sources=(plain, MaskedSource(other, masks[mask])))


def batches(
    dataset: Dataset, rank: int = 0, size: int = 1, eod_mask_loss: bool = False
) -> list[Batch]:
    reader = BatchReader(rank, size, 3, CPU, mask_documents=True, eod_mask_loss=eod_mask_loss)
    return list(training_batches(dataset, reader, 0))


def targets(batch: Batch) -> Tensor:
    return torch.cat([micro_batch.targets for micro_batch in batch.micro_batches])


def model() -> Decoder:
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2)
    decoder = Decoder(families.get(cfg.family).architecture(cfg, VOCAB_SIZE, SEQ_LEN))
    initialize(decoder, seed=0)
    return decoder


def step(decoder: Decoder, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a step, as the trainer computes them."""
    decoder.zero_grad()
    loss = Step(decoder, "fp32").run(batch.micro_batches, next_token(), batch.targets).loss
    return loss, {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_masked_tokens_are_not_targets(tokens: Path, packing: str, eod_mask_loss: bool) -> None:
    plain = opened(tokens, "none", f"data.packing={packing}")
    masked = opened(tokens, "random", f"data.packing={packing}")
    mask = random_mask(len(masked.sources[1]))
    pairs = zip(
        batches(plain, eod_mask_loss=eod_mask_loss),
        batches(masked, eod_mask_loss=eod_mask_loss),
        strict=True,
    )
    for before, after in pairs:
        assert np.array_equal(before.samples, after.samples)
        from_masked = (before.samples >> np.uint64(SOURCE_SHIFT)) == 1
        numbers = before.samples & np.uint64((1 << SOURCE_SHIFT) - 1)
        kept = np.ones((SEQUENCES, SEQ_LEN), np.bool_)
        kept[from_masked] = mask[numbers[from_masked]]
        expected = targets(before).masked_fill(~torch.from_numpy(kept), IGNORE_INDEX)
        assert torch.equal(targets(after), expected)
        for was, now in zip(before.micro_batches, after.micro_batches, strict=True):
            assert torch.equal(was.tokens, now.tokens)
            assert was.doc_ids is not None
            assert now.doc_ids is not None
            assert torch.equal(was.doc_ids, now.doc_ids)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_counts_the_targets_of_all_ranks(
    tokens: Path, packing: str, eod_mask_loss: bool, size: int
) -> None:
    dataset = opened(tokens, "random", f"data.packing={packing}")
    ranks = [batches(dataset, rank, size, eod_mask_loss) for rank in range(size)]
    for parts in zip(*ranks, strict=True):
        count = sum(int((targets(part) != IGNORE_INDEX).sum()) for part in parts)
        assert {part.targets for part in parts} == {count}


def test_the_count_of_a_masked_source_needs_no_reading(tokens: Path) -> None:
    source = opened(tokens, "random").sources[1]
    assert isinstance(source, MaskedSource)
    assert source.mask is not None
    samples, reads = source.samples_at(0, len(source)), source.reads
    count = BatchReader(0, 1, 3, CPU).count_targets(source, samples)
    assert source.reads == reads
    assert count == source.mask.sum()


def test_loss_and_gradients_are_those_of_the_unmasked_targets_alone(tokens: Path) -> None:
    decoder = model()
    for batch in batches(opened(tokens, "random"))[:3]:
        loss, gradients = step(decoder, batch)
        decoder.zero_grad()
        manual, count = torch.zeros(()), 0
        for micro_batch in batch.micro_batches:
            logits = decoder(micro_batch.tokens, doc_ids_BT=micro_batch.doc_ids)
            kept = micro_batch.targets != IGNORE_INDEX
            manual = manual + F.cross_entropy(
                logits[kept], micro_batch.targets[kept], reduction="sum"
            )
            count += int(kept.sum())
        assert 0 < count < SEQUENCES * SEQ_LEN
        manual = manual / count
        manual.backward()
        torch.testing.assert_close(loss, manual.detach())
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_a_mask_of_ones_changes_no_bit_of_a_step(tokens: Path, eod_mask_loss: bool) -> None:
    decoder = model()
    none, ones = (
        batches(opened(tokens, mask, "data.packing=best-fit"), eod_mask_loss=eod_mask_loss)
        for mask in ("none", "ones")
    )
    for without, with_mask in zip(none[:3], ones[:3], strict=True):
        assert without.targets == with_mask.targets
        assert torch.equal(targets(without), targets(with_mask))
        loss, gradients = step(decoder, without)
        same_loss, same_gradients = step(decoder, with_mask)
        assert torch.equal(loss, same_loss)
        assert gradients.keys() == same_gradients.keys()
        assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)


def test_a_batch_without_targets_has_loss_and_gradients_of_zero(tokens: Path) -> None:
    dataset = opened(tokens, "random", "data.weights=[{step: 2, weights: {a: 0, b: 1}}]")
    (masked,) = dataset.sources[1:]
    assert isinstance(masked, MaskedSource)
    numbers = np.flatnonzero(masked.counts == 0).astype(np.uint64)[:SEQUENCES]
    reader = BatchReader(0, 1, 3, CPU)
    empty = Batch(numbers, *reader.count_terms(masked, numbers), reader.read(masked, numbers))
    assert empty.targets == 0
    loss, gradients = step(model(), empty)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


def test_validation_measures_the_unmasked_targets_and_leaves_out_sources_without_any(
    tokens: Path,
) -> None:
    dataset = opened(tokens, "none")
    first, second = dataset.validation
    assert isinstance(first, TokenSource)
    assert isinstance(second, TokenSource)
    mask = random_mask(len(first))
    masked = MaskedSource(first, mask)
    untrained = MaskedSource(second, np.zeros_like(random_mask(len(second))))
    dataset = replace(dataset, validation=(masked, untrained))
    reader = BatchReader(0, 1, 4, CPU)
    parts = held_out(dataset, reader, 2 * len(first))
    assert [part.source for part in parts] == [masked]
    world = dist.start(Ranks(), "cpu")
    decoder = model()
    measure = partial(Step(decoder, "fp32").evaluate, objective=next_token())
    record = Evaluator(parts, reader, decoder, measure, world).record(1, lambda: False)
    assert record is not None
    ids = torch.from_numpy(first.read(np.arange(len(first), dtype=np.uint64)).ids)
    with torch.no_grad():
        logits = decoder(ids[:, :-1])
    kept = torch.from_numpy(mask)
    expected = F.cross_entropy(logits[kept], ids[:, 1:][kept])
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-5)
