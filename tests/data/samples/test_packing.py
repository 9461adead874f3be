"""Best-fit packing: no token lost, nothing cut that fits, as tight as best fit decreasing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtt.data.samples.packing import best_fit, pack

CAPACITY = st.integers(1, 40)
LENGTHS = st.lists(st.integers(0, 120), max_size=60)
GOLDEN = [0, 1, 2, 2, 0, 3, 3, 1]


def decreasing(lengths: list[int], capacity: int, *, best: bool) -> list[int]:
    """Room left in each bin after best fit, or first fit, decreasing: one item after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity - length)
        elif best:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms[fitting[0]] -= length
    return sorted(rooms)


def bounds(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum([7, *lengths], dtype=np.int64)  # documents need not begin at 0


@settings(max_examples=300)
@given(lengths=LENGTHS, capacity=CAPACITY)
def test_every_token_is_in_one_bin_and_no_bin_holds_too_many(
    lengths: list[int], capacity: int
) -> None:
    packed = pack(bounds(lengths), capacity)
    tokens = [
        token
        for start, length in zip(packed.start, packed.length, strict=True)
        for token in range(start, start + length)
    ]
    assert sorted(tokens) == list(range(7, 7 + sum(lengths)))
    assert packed.first[-1] == len(packed.start)
    for first, stop in zip(packed.first, packed.first[1:], strict=False):
        assert 1 <= packed.length[first:stop].sum() <= capacity
        assert (np.diff(packed.start[first:stop]) > 0).all()  # in the order of the text


@given(lengths=LENGTHS, capacity=CAPACITY)
def test_without_packing_each_document_is_alone(lengths: list[int], capacity: int) -> None:
    packed, best = (pack(bounds(lengths), capacity, how) for how in ("none", "best-fit"))
    assert packed.first.tolist() == list(range(len(packed.start) + 1))
    pieces, all_pieces = (
        {*zip(one.start.tolist(), one.length.tolist(), strict=True)} for one in (packed, best)
    )
    assert pieces == {piece for piece in all_pieces if piece[1] > 1}


@settings(max_examples=300)
@given(lengths=LENGTHS, capacity=CAPACITY)
def test_only_documents_longer_than_a_bin_are_cut(lengths: list[int], capacity: int) -> None:
    packed = pack(bounds(lengths), capacity)
    found = sorted(zip(packed.start.tolist(), packed.length.tolist(), strict=True))
    expected = [
        (start + at, min(capacity, length - at))
        for start, length in zip(bounds(lengths).tolist(), lengths, strict=False)
        for at in range(0, length, capacity)
    ]
    assert found == expected


@settings(max_examples=500)
@given(lengths=st.lists(st.integers(1, 40), max_size=80), capacity=st.integers(40, 60))
def test_bins_are_those_of_best_fit_decreasing_item_by_item(
    lengths: list[int], capacity: int
) -> None:
    bins = best_fit(np.array(lengths, dtype=np.int64), capacity)
    rooms = capacity - np.bincount(bins, weights=np.array(lengths, dtype=float))
    assert sorted(rooms.tolist()) == decreasing(lengths, capacity, best=True)


def test_the_bins_are_the_same_in_every_version() -> None:
    """A golden value: to change it is to change what every resumed job is trained on."""
    lengths = np.array([8, 3, 5, 5, 2, 2, 4, 7], dtype=np.int64)
    assert best_fit(lengths, 10).tolist() == GOLDEN


def test_documents_of_real_sizes_leave_almost_no_room() -> None:
    """Utilisation as the paper reports it: above 99.9 % at 2,048 tokens."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(6, 1, 50_000).astype(np.int64))
    packed = pack(np.cumsum([0, *lengths]), 2049)
    assert lengths.sum() / (2049 * (len(packed.first) - 1)) > 0.999
