"""The order of training: a keyed permutation that looks random and needs no state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtt.data.samples.protocol import SampleNumbers
from dtt.data.samples.shuffle import BLOCK, EMPTY_DATA_HASH, Order, extend_data_hash, permutation

GOLDEN = [593, 921, 385, 655, 298, 232, 640, 448, 462, 634]
GOLDEN_LEDGER = "f5d64608fd341347d70c4a6b5bf0df0e"


def positions(count: int) -> SampleNumbers:
    return np.arange(count, dtype=np.uint64)


@settings(max_examples=200)
@given(size=st.integers(1, 5000), key=st.binary(max_size=12))
def test_every_index_has_exactly_one_position(size: int, key: bytes) -> None:
    image = permutation(positions(size), size, key)
    assert np.array_equal(np.sort(image), positions(size))


@pytest.mark.parametrize("size", [2**20, 2**31 + 11, 10**12, 2**40 - 1, 2**63, 2**64 - 1])
def test_sizes_beyond_any_index_file_work_too(size: int) -> None:
    rng = np.random.default_rng(0)
    index = np.unique(rng.integers(0, size, 20_000, dtype=np.uint64))
    image = permutation(index, size, b"key")
    assert len(np.unique(image)) == len(index)
    assert int(image.max()) < size
    assert int(image.max()) > 0.99 * size  # and they reach all over the range


@pytest.mark.parametrize("size", [1000, 4096, 4097, 60_000])
def test_sorted_data_comes_out_as_after_a_random_shuffle(size: int) -> None:
    """Four statistics over 20 keys; each must lie within 5 standard errors of its expectation."""
    index = positions(size).astype(float)
    figures = []
    for key in range(20):
        image = permutation(positions(size), size, str(key).encode()).astype(float)
        neighbours = np.corrcoef(image[:-1], image[1:])[0, 1]
        place = np.corrcoef(index, image)[0, 1]
        displacement = np.abs(image - index).mean() / size
        fixed = (image == index).sum()
        figures.append((neighbours, place, displacement, fixed))
    means = np.mean(figures, axis=0)
    # Of a random permutation: correlations 0 ± 1/sqrt(n), |i - j| uniform: 1/3 ± ~0.3/sqrt(n),
    # one fixed point ± 1.
    spread = np.array([1 / size**0.5, 1 / size**0.5, 0.3 / size**0.5, 1]) / 20**0.5
    assert np.all(np.abs(means - [0, 0, 1 / 3, 1]) < 5 * spread)


@settings(max_examples=20)
@given(
    samples=st.integers(BLOCK - 1, 3 * BLOCK),
    cuts=st.lists(
        st.tuples(st.integers(0, 8 * BLOCK), st.integers(0, 2 * BLOCK)), min_size=1, max_size=5
    ),
)
def test_samples_are_those_of_the_permutation_wherever_one_begins(
    samples: int, cuts: list[tuple[int, int]]
) -> None:
    order = Order("web", samples)
    for first, count in cuts:
        places = np.arange(first, first + count)
        expected = np.empty(count, dtype=np.uint64)
        for epoch in np.unique(places // samples).tolist():
            mine = places // samples == epoch
            index = (places[mine] % samples).astype(np.uint64)
            expected[mine] = permutation(index, samples, f"web/{epoch}".encode())
        assert np.array_equal(order.order(first, count), expected)


def test_the_order_is_the_same_in_every_version() -> None:
    """A golden value: to change it is to change what every resumed job is trained on."""
    assert Order("0/tokens", 1000).order(995, 10).tolist() == GOLDEN
    ledger = extend_data_hash(EMPTY_DATA_HASH, Order("0/tokens", 1000).order(0, 8))
    assert ledger.hex() == GOLDEN_LEDGER


@settings(max_examples=100)
@given(
    ids=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20, unique=True),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 63),
)
def test_the_data_hash_detects_different_samples_and_order(
    ids: list[int], place: int, bit: int
) -> None:
    place %= len(ids)
    samples = np.array(ids, dtype=np.uint64)
    ledger = extend_data_hash(EMPTY_DATA_HASH, samples)
    changed, swapped = samples.copy(), np.roll(samples, 1)
    changed[place] ^= np.uint64(1 << bit)
    for other in (changed, swapped, samples[:-1]):
        assert extend_data_hash(EMPTY_DATA_HASH, other) != ledger
    assert extend_data_hash(ledger, samples) != ledger
    assert extend_data_hash(EMPTY_DATA_HASH, samples.copy()) == ledger
