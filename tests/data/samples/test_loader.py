"""Batches: the same global batch for any number of ranks, from any step on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import read_doc_ids

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import DamagedError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.loader import Batch, BatchReader, training_batches
from dtt.data.samples.protocol import SOURCE_SHIFT
from dtt.data.samples.shuffle import EMPTY_DATA_HASH, extend_data_hash
from dtt.data.token_file import bin_path

SEQUENCES, SEQ_LEN = 8, 32
CPU = torch.device("cpu")


def opened(*arguments: str, steps: int = 1000) -> Dataset:
    """Open the data, with attention masked between documents."""
    arguments = ("data.mask_documents=true", *arguments)
    lengths = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQUENCES * SEQ_LEN}")
    return open_dataset(resolve(None, [*lengths, f"train.steps={steps}", *arguments]).config)


@pytest.fixture(scope="module", params=["windows", "mixture", "packed"])
def any_dataset(request: pytest.FixtureRequest, tokens: Path) -> Dataset:
    mixture = (
        f"data.sources=[{{name: a, path: {tokens}, weight: 0.7}}, "
        f"{{name: b, path: {tokens}, weight: 0.3}}]"
    )
    keys = {
        "windows": (f"data.tokens={tokens}",),
        "mixture": (mixture, "data.weights=[{step: 40, weights: {a: 1, b: 4}}]"),
        "packed": (mixture, "data.packing=best-fit"),
    }[request.param]
    return opened(*keys)


def batches(
    dataset: Dataset, rank: int = 0, size: int = 1, micro_batch: int = 4, first_step: int = 0
) -> Iterator[Batch]:
    reader = BatchReader(rank, size, micro_batch, CPU)
    return training_batches(dataset, reader, first_step)


def rows(batch: Batch) -> list[tuple[bytes, ...]]:
    """Its rows: tokens, targets, documents."""
    return [
        (row.numpy().tobytes(), target.numpy().tobytes(), document.numpy().tobytes())
        for part in batch.micro_batches
        if part.doc_ids is not None
        for row, target, document in zip(part.tokens, part.targets, part.doc_ids, strict=True)
    ]


def expected(dataset: Dataset, step: int) -> list[tuple[bytes, ...]]:
    samples = dataset.order(step * SEQUENCES, SEQUENCES)
    ids = dataset.read(samples).ids
    documents = read_doc_ids(dataset, samples)
    return [
        (np.maximum(row[:-1], 0).tobytes(), row[1:].tobytes(), document[:-1].tobytes())
        for row, document in zip(ids, documents, strict=True)
    ]


@settings(max_examples=60)
@given(size=st.sampled_from([1, 2, 4, 8]), micro_batch=st.integers(1, 9), step=st.integers(0, 900))
def test_row_i_of_a_step_does_not_depend_on_start_ranks_or_micro_batches(
    any_dataset: Dataset, size: int, micro_batch: int, step: int
) -> None:
    parts = [next(batches(any_dataset, rank, size, micro_batch, step)) for rank in range(size)]
    whole = expected(any_dataset, step)
    for rank, part in enumerate(parts):
        assert rows(part) == whole[rank::size]
        assert all(len(inner.tokens) <= micro_batch for inner in part.micro_batches)
    every_target = [inner.targets for part in parts for inner in part.micro_batches]
    count = int((torch.cat(every_target) != IGNORE_INDEX).sum())
    assert {part.targets for part in parts} == {count}
    assert len({part.samples.tobytes() for part in parts}) == 1


GROWING = (
    "train.batch_schedule={type: list, stages: [[0, 64], [4, 128], [8, 192], [12, 256]]}",
    "train.context_schedule=[[0, 8], [600 tokens, 16], [50%, 32]]",
)


@pytest.fixture(scope="module")
def growing(tokens: Path) -> Dataset:
    """Batches and contexts that grow, over two sources whose weights change on the way."""
    mixture = f"data.sources=[{{name: a, path: {tokens}}}, {{name: b, path: {tokens}}}]"
    weights = "[{step: 6, weights: {a: 1, b: 0}}, {step: 11, weights: {a: 0, b: 1}}]"
    return opened(mixture, f"data.weights={weights}", *GROWING, steps=40)


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 9)])
def test_growing_batches_are_the_same_for_any_ranks_and_micro_batches(
    growing: Dataset, size: int, micro_batch: int
) -> None:
    ranks = [batches(growing, rank, size, micro_batch) for rank in range(size)]
    ledger, position = EMPTY_DATA_HASH, 0
    for step, parts in enumerate(zip(*ranks, strict=True)):
        samples = growing.order(position, [2, 4, 6, 8][min(step // 4, 3)])
        ledger, position = extend_data_hash(ledger, samples), position + len(samples)
        assert all(np.array_equal(part.samples, samples) for part in parts)
        assert len({len(part.micro_batches) for part in parts}) == 1  # they meet in collectives
        assert all(part.targets == len(samples) * SEQ_LEN for part in parts)
        seq_len = 8 if position * SEQ_LEN < 664 else 16 if step < 20 else 32
        inner = [micro for part in parts for micro in part.micro_batches]
        assert {micro.tokens.shape[1] for micro in inner} == {seq_len}
        assert all(micro.tokens.numel() <= micro_batch * SEQ_LEN for micro in inner)
    assert step == 39
    assert position == growing.first_sample(40) == growing.mixture.end
    whole = growing.order(0, position)
    firsts = [growing.first_sample(step) for step in range(41)]
    again = EMPTY_DATA_HASH
    for first, following in pairwise(firsts):
        again = extend_data_hash(again, whole[first:following])
    assert again == ledger


def test_the_rows_of_a_shorter_context_put_together_are_the_sequences(growing: Dataset) -> None:
    for step, batch in enumerate(batches(growing, micro_batch=3)):
        samples = growing.order(growing.first_sample(step), len(batch.samples))
        ids = growing.read(samples).ids
        documents = read_doc_ids(growing, samples)
        kept = [part.doc_ids for part in batch.micro_batches if part.doc_ids is not None]
        for rows, expected in (
            ([part.tokens for part in batch.micro_batches], ids[:, :-1]),
            ([part.targets for part in batch.micro_batches], ids[:, 1:]),
            (kept, documents[:, :-1]),
        ):
            assert torch.equal(torch.cat(rows).reshape(-1, SEQ_LEN), torch.from_numpy(expected))


def test_weights_change_at_their_step_for_any_batch_size(growing: Dataset) -> None:
    for step, batch in enumerate(batches(growing)):
        sources = set((batch.samples >> np.uint64(SOURCE_SHIFT)).tolist())
        assert sources == ({0, 1} if step < 5 else {0} if step < 10 else {1})


def test_a_run_without_more_data_ends_with_its_last_complete_step(tokens: Path) -> None:
    once = ["data.on_exhausted=stop", "train.batch_schedule={type: doubling, start: 32, every: 5}"]
    short = opened(f"data.tokens={tokens}", *once)
    sizes = [len(batch.samples) for batch in batches(short)]
    assert sizes == [*[1] * 5, *[2] * 5, *[4] * 5, *[8] * ((len(short.sources[0]) - 35) // 8)]


def test_padding_is_a_target_that_is_ignored_and_an_id_that_exists(tokens: Path) -> None:
    packed = opened(f"data.tokens={tokens}", "data.packing=best-fit")
    found = [part for batch in islice(batches(packed), 20) for part in batch.micro_batches]
    padding = [part.targets == IGNORE_INDEX for part in found]
    assert any(part.any() for part in padding)
    assert all(part.tokens.min() >= 0 for part in found)
    for part, padded in zip(found, padding, strict=True):
        assert torch.equal(
            part.tokens[:, 1:][~padded[:, :-1]], part.targets[:, :-1][~padded[:, :-1]]
        )


def test_data_that_cannot_be_read_is_reported_with_its_step(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(tokens, tmp_path / "tokens")
    cut = opened(f"data.tokens={copy}")
    stem = next(s.stem for s in TokensManifest.read(copy).shards if s.split == "train")
    with bin_path(copy / stem).open("r+b") as file:
        file.truncate(10)
    run, trained = batches(cut), 0
    with pytest.raises(DamagedError, match=stem):
        for trained, _ in enumerate(run, start=1):  # noqa: B007
            pass
    assert f"rank 0 cannot read the data of step {trained + 1}" in caplog.text


def test_the_thread_ends_with_the_generator(tokens: Path) -> None:
    generator = batches(opened(f"data.tokens={tokens}"))
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
