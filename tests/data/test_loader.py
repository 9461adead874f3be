"""Batches: the same global batch for any number of ranks, from any step on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dtt.artifacts import TokensManifest
from dtt.data.loader import Batch, Share, training_batches
from dtt.data.order import Order
from dtt.data.windows import Windows
from dtt.errors import InputError

SEQUENCES, SEQ_LEN = 8, 32
CPU = torch.device("cpu")


@pytest.fixture
def source(tokens: Path) -> Windows:
    return Windows(tokens, TokensManifest.read(tokens), "train", SEQ_LEN)


def batches(
    source: Windows, rank: int = 0, size: int = 1, micro_batch: int = 4, first_step: int = 0
) -> Iterator[Batch]:
    share = Share(rank, size, micro_batch, CPU)
    return training_batches(source, Order(7, len(source)), share, SEQUENCES, first_step)


def rows(batch: Batch) -> list[tuple[bytes, bytes]]:
    """Its `(tokens, targets)` rows."""
    return [
        (row.numpy().tobytes(), target.numpy().tobytes())
        for tokens, targets in batch.micro_batches
        for row, target in zip(tokens, targets, strict=True)
    ]


def expected(source: Windows, step: int) -> list[tuple[bytes, bytes]]:
    ids = source.read(Order(7, len(source)).windows_at(step * SEQUENCES, SEQUENCES))
    return [(row[:-1].tobytes(), row[1:].tobytes()) for row in ids]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 100])
def test_all_ranks_together_hold_the_same_global_batch(
    source: Windows, size: int, micro_batch: int
) -> None:
    steps = 2 + len(source) // SEQUENCES  # into the second epoch
    ranks = [batches(source, rank, size, micro_batch) for rank in range(size)]
    for step in range(steps):
        parts = [next(rank) for rank in ranks]
        assert all(np.array_equal(part.windows, parts[0].windows) for part in parts)
        assert sorted(row for part in parts for row in rows(part)) == sorted(expected(source, step))
        for part in parts:
            assert len(rows(part)) == SEQUENCES // size
            assert all(len(tokens) <= micro_batch for tokens, _ in part.micro_batches)


def test_targets_are_the_tokens_that_follow(source: Windows) -> None:
    tokens, targets = next(batches(source)).micro_batches[0]
    assert tokens.shape == targets.shape == (4, SEQ_LEN)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("skipped", [1, 5, 300])
def test_starting_at_a_step_equals_skipping_to_it(source: Windows, skipped: int) -> None:
    direct = islice(batches(source, first_step=skipped), 3)
    walked = islice(batches(source), skipped, skipped + 3)
    for a, b in zip(direct, walked, strict=True):
        assert rows(a) == rows(b)
        assert np.array_equal(a.windows, b.windows)


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_the_thread_ends_with_the_generator(source: Windows) -> None:
    generator = batches(source)
    next(generator)
    assert len(loaders()) == 1
    generator.close()  # type: ignore[attr-defined]
    assert loaders() == []


def test_the_thread_ends_when_the_loop_is_left_by_an_error(source: Windows) -> None:
    def loop() -> Tensor:
        for batch in batches(source):
            return batch.micro_batches[5][0]
        raise AssertionError

    with pytest.raises(IndexError) as caught:
        loop()
    del caught
    assert loaders() == []


def test_an_error_while_reading_ahead_reaches_the_loop(tokens: Path, tmp_path: Path) -> None:
    windows = Windows(tmp_path, TokensManifest.read(tokens), "train", SEQ_LEN)
    with pytest.raises(InputError, match="missing"):
        next(batches(windows))
    assert loaders() == []
