"""Batches: the same global batch for any number of ranks, from any step on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtt.artifacts import TokensManifest
from dtt.config.load import resolve
from dtt.data.dataset import Dataset, open_dataset
from dtt.data.loader import Batch, Share, training_batches
from dtt.data.source import PADDING
from dtt.data.tokenfile import bin_path
from dtt.errors import DamagedError, InputError

SEQUENCES, SEQ_LEN = 8, 32
CPU = torch.device("cpu")


def opened(*arguments: str, steps: int = 1000) -> Dataset:
    lengths = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQUENCES * SEQ_LEN}")
    return open_dataset(resolve(None, [*lengths, f"train.steps={steps}", *arguments]).config)


@pytest.fixture
def dataset(tokens: Path) -> Dataset:
    return opened(f"data.tokens={tokens}")


@pytest.fixture(scope="module", params=["windows", "mixture", "packed"])
def any_dataset(request: pytest.FixtureRequest, tokens: Path) -> Dataset:
    mixture = (
        f"data.sources=[{{name: a, path: {tokens}, weight: 0.7}}, "
        f"{{name: b, path: {tokens}, weight: 0.3}}]"
    )
    return {
        "windows": lambda: opened(f"data.tokens={tokens}"),
        "mixture": lambda: opened(mixture, "data.weights=[{step: 40, weights: {a: 1, b: 4}}]"),
        "packed": lambda: opened(mixture, "data.packing=best-fit"),
    }[request.param]()


def batches(
    dataset: Dataset, rank: int = 0, size: int = 1, micro_batch: int = 4, first_step: int = 0
) -> Iterator[Batch]:
    share = Share(rank, size, micro_batch, CPU, mask_documents=True)
    return training_batches(dataset, share, first_step)


def rows(batch: Batch) -> list[tuple[bytes, ...]]:
    """Its rows: tokens, targets, documents."""
    return [
        (row.numpy().tobytes(), target.numpy().tobytes(), document.numpy().tobytes())
        for part in batch.micro_batches
        if part.documents is not None
        for row, target, document in zip(part.tokens, part.targets, part.documents, strict=True)
    ]


def expected(dataset: Dataset, step: int) -> list[tuple[bytes, ...]]:
    samples = dataset.samples_at(step * SEQUENCES, SEQUENCES)
    ids = dataset.read(samples)
    documents = dataset.documents(samples, ids)
    return [
        (np.maximum(row[:-1], 0).tobytes(), row[1:].tobytes(), document[:-1].tobytes())
        for row, document in zip(ids, documents, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 100])
def test_all_ranks_together_hold_the_same_global_batch(
    any_dataset: Dataset, size: int, micro_batch: int
) -> None:
    steps = 2 + len(any_dataset.sources[0]) // SEQUENCES  # into the second epoch
    ranks = [batches(any_dataset, rank, size, micro_batch) for rank in range(size)]
    for step in range(steps):
        parts = [next(rank) for rank in ranks]
        whole = expected(any_dataset, step)
        assert sorted(row for part in parts for row in rows(part)) == sorted(whole)
        for part in parts:
            assert np.array_equal(part.samples, parts[0].samples)
            assert len(rows(part)) == SEQUENCES // size
            assert all(len(inner.tokens) <= micro_batch for inner in part.micro_batches)
            assert part.targets == parts[0].targets
        real = [(inner.targets != PADDING).sum() for part in parts for inner in part.micro_batches]
        assert sum(real) == parts[0].targets


@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from([1, 2, 4, 8]), micro_batch=st.integers(1, 9), step=st.integers(0, 900))
def test_row_i_of_a_step_is_the_same_wherever_a_run_of_any_shape_begins(
    any_dataset: Dataset, size: int, micro_batch: int, step: int
) -> None:
    parts = [next(batches(any_dataset, rank, size, micro_batch, step)) for rank in range(size)]
    whole = expected(any_dataset, step)
    for rank, part in enumerate(parts):
        assert rows(part) == whole[rank::size]


def test_targets_are_the_tokens_that_follow(dataset: Dataset) -> None:
    part = next(batches(dataset)).micro_batches[0]
    assert part.tokens.shape == part.targets.shape == (4, SEQ_LEN)
    assert torch.equal(part.tokens[:, 1:], part.targets[:, :-1])


def test_padding_is_a_target_that_is_ignored_and_an_id_that_exists(tokens: Path) -> None:
    packed = opened(f"data.tokens={tokens}", "data.packing=best-fit")
    found = [part for batch in islice(batches(packed), 20) for part in batch.micro_batches]
    padding = [part.targets == PADDING for part in found]
    assert any(part.any() for part in padding)
    assert all(part.tokens.min() >= 0 for part in found)
    for part, padded in zip(found, padding, strict=True):
        assert torch.equal(
            part.tokens[:, 1:][~padded[:, :-1]], part.targets[:, :-1][~padded[:, :-1]]
        )


def test_documents_are_left_out_when_they_may_see_each_other(dataset: Dataset) -> None:
    share = Share(0, 1, 4, CPU, mask_documents=False)
    assert next(training_batches(dataset, share, 0)).micro_batches[0].documents is None


@pytest.mark.parametrize("skipped", [1, 5, 300])
def test_starting_at_a_step_equals_skipping_to_it(any_dataset: Dataset, skipped: int) -> None:
    direct = islice(batches(any_dataset, first_step=skipped), 3)
    walked = islice(batches(any_dataset), skipped, skipped + 3)
    for a, b in zip(direct, walked, strict=True):
        assert rows(a) == rows(b)
        assert np.array_equal(a.samples, b.samples)


def test_data_that_cannot_be_read_is_told_with_its_step(
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


def test_the_run_ends_with_its_last_step(tokens: Path) -> None:
    short = opened(f"data.tokens={tokens}", steps=5)
    assert len(list(batches(short))) == 5
    assert len(list(batches(short, first_step=3))) == 2


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_the_thread_ends_with_the_generator(dataset: Dataset) -> None:
    generator = batches(dataset)
    next(generator)
    assert len(loaders()) == 1
    generator.close()  # type: ignore[attr-defined]
    assert loaders() == []


def test_the_thread_ends_when_the_loop_is_left_by_an_error(dataset: Dataset) -> None:
    def loop() -> Tensor:
        for batch in batches(dataset):
            return batch.micro_batches[5].tokens
        raise AssertionError

    with pytest.raises(IndexError) as caught:
        loop()
    del caught
    assert loaders() == []


def test_an_error_while_reading_ahead_reaches_the_loop(tokens: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokens"
    shutil.copytree(tokens, copy)
    dataset = opened(f"data.tokens={copy}")
    for ids in copy.glob("*.bin"):
        ids.unlink()
    with pytest.raises(InputError, match="missing"):
        next(batches(dataset))
    assert loaders() == []
