"""Mixtures: shares hold over every prefix, and all is a pure function of weights and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtt.data.samples import mixture as module
from dtt.data.samples.mixture import (
    LONGEST_PATTERN,
    Mixture,
    OnExhausted,
    Weights,
    pattern,
    shares,
)

DECIMALS = st.integers(1, 300).map(lambda n: Fraction(n, 100))
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def weights(*decimals: float) -> Weights:
    return tuple(Fraction(str(decimal)) for decimal in decimals)


def mixture(
    sizes: list[int], given: Weights, on_exhausted: OnExhausted = "repeat", samples: int = 2000
) -> Mixture:
    return Mixture(sizes, [(0, given)], on_exhausted, samples)


def order(mixed: Mixture) -> list[tuple[int, int]]:
    """(source, place) of all positions."""
    sources, places = mixed.places(0, mixed.end)
    return list(zip(sources.tolist(), places.tolist(), strict=True))


def prefix_counts(sources: list[int], number: int) -> np.ndarray:
    """[positions + 1, sources]"""
    taken = np.eye(number, dtype=np.int64)[sources]
    return np.concatenate([np.zeros((1, number), np.int64), taken.cumsum(axis=0)])


def assert_shares_hold(sources: list[int], given: Weights) -> None:
    """After any number of samples each source has had its share, to within less than one sample."""
    parts = np.array([int(weight * 100) for weight in given])
    positions = np.arange(len(sources) + 1)[:, None]
    counts = prefix_counts(sources, len(given))
    assert np.all(np.abs(counts * parts.sum() - positions * parts) < parts.sum())


@settings(max_examples=100)
@given(
    phases=st.lists(st.tuples(st.integers(1, 400), *[st.integers(0, 50)] * 3), max_size=4).filter(
        lambda found: all(any(phase[1:]) for phase in found)
    )
)
def test_shares_are_exact_in_every_phase_and_positions_continue(
    phases: list[tuple[int, ...]],
) -> None:
    changes = [(0, weights(1, 1, 1))]
    for length, *parts in phases:
        changes.append((changes[-1][0] + length, weights(*parts)))
    mixed = Mixture([5, 50, 500], changes, "repeat", changes[-1][0] + 300)
    found = order(mixed)
    ends = [start for start, _ in changes[1:]] + [mixed.end]
    for (start, stated), end in zip(changes, ends, strict=True):
        assert_shares_hold([source for source, _ in found[start:end]], stated)
    for source in range(3):
        places = [place for s, place in found if s == source]
        assert places == list(range(len(places)))


@settings(max_examples=100)
@given(
    sizes=SIZES,
    data=st.data(),
    on_exhausted=st.sampled_from(["repeat", "stop", "renormalise"]),
)
def test_any_position_of_the_run_is_computed_directly(
    sizes: list[int], data: st.DataObject, on_exhausted: OnExhausted
) -> None:
    number = len(sizes)
    many = st.lists(DECIMALS, min_size=number, max_size=number).map(tuple)
    mixed = Mixture(sizes, [(0, data.draw(many)), (31, data.draw(many))], on_exhausted, 300)
    whole = order(mixed)
    for _ in range(5):
        first = data.draw(st.integers(0, mixed.end))
        count = data.draw(st.integers(0, mixed.end - first))
        sources, places = mixed.places(first, count)
        pairs = list(zip(sources.tolist(), places.tolist(), strict=True))
        assert pairs == whole[first : first + count]
        counts = prefix_counts([source for source, _ in whole], number)
        assert mixed.counts(first).tolist() == counts[first].tolist()


@settings(max_examples=100)
@given(sizes=SIZES, data=st.data())
def test_stop_ends_with_the_last_sample_of_the_first_source_exhausted(
    sizes: list[int], data: st.DataObject
) -> None:
    many = st.lists(DECIMALS, min_size=len(sizes), max_size=len(sizes)).map(tuple)
    given = data.draw(many)
    endless = order(mixture(sizes, given, samples=5000))
    last = next(k for k, (source, place) in enumerate(endless) if place == sizes[source] - 1)
    assert order(mixture(sizes, given, "stop", 5000)) == endless[: last + 1]


def test_decimals_are_taken_as_they_are_written() -> None:
    assert shares(weights(0.1, 0.2, 0.7)) == (1, 2, 7)
    assert shares(weights(3, 1e-3)) == (3000, 1)
    assert shares(weights(0, 5)) == (0, 1)


@pytest.mark.parametrize(
    "given", [(0.123456789, 0.2, 0.7), (1e12 + 1, 1, 3), (1, *[1e-9] * 30), (1 / 3, 1 / 7)]
)
def test_shares_with_a_long_period_are_rounded(given: tuple[float, ...]) -> None:
    exact = weights(*given)
    counts = shares(exact)
    assert sum(counts) == LONGEST_PATTERN
    assert min(counts) >= 1
    for count, weight in zip(counts, exact, strict=True):
        assert abs(count - LONGEST_PATTERN * weight / sum(exact)) < max(1, len(given))


def test_the_order_of_sources_is_the_same_in_every_version() -> None:
    """A golden value: to change it is to change what every resumed job is trained on."""
    sources, _ = mixture([9, 9, 9], weights(0.5, 0.3, 0.2)).places(0, 12)
    assert "".join(map(str, sources.tolist())) == "010201010201"


def exact_shares(given: Weights) -> tuple[int, ...]:
    """Shares by exact fractions, without rounding."""
    parts = [weight / sum(given) for weight in given]
    period = lcm(*(part.denominator for part in parts))
    return tuple(int(part * period) for part in parts)


def order_by_definition(sizes: list[int], given: Weights, samples: int) -> list[tuple[int, int]]:
    """(source, place) of all positions, sample by sample: a source that is used up leaves."""
    found: list[tuple[int, int]] = []
    taken = [0] * len(sizes)
    while len(found) < samples:
        alive = zip(given, taken, sizes, strict=True)
        left = tuple(weight if used < size else Fraction(0) for weight, used, size in alive)
        if not any(left):
            break
        counts = exact_shares(left)
        period, done = sum(counts), [0] * len(counts)
        for slot in range(samples):
            # Earliest deadline first, among the sources that have reached their ideal position.
            ready = [
                (-(-(done[i] + 1) * period // n), i)
                for i, n in enumerate(counts)
                if n and done[i] * period // n <= slot
            ]
            _, source = min(ready)
            found.append((source, taken[source]))
            done[source] += 1
            taken[source] += 1
            if taken[source] == sizes[source] or len(found) == samples:
                break
    return found


@settings(max_examples=100)
@given(sizes=SIZES, data=st.data())
def test_the_order_is_that_of_its_definition(sizes: list[int], data: st.DataObject) -> None:
    given = data.draw(st.lists(DECIMALS, min_size=len(sizes), max_size=len(sizes)).map(tuple))
    samples = data.draw(st.integers(1, 250))
    mixed = mixture(sizes, given, "renormalise", samples)
    assert order(mixed) == order_by_definition(sizes, given, samples)
    assert mixed.end == min(samples, sum(sizes))


def test_the_work_of_a_plan_grows_with_the_samples_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sources that are exhausted one after the other give a phase each, mostly a short one."""
    counted: list[int] = []
    slots = module._slots

    def counting(counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        for slot in slots(counts):
            counted.append(1)
            yield slot

    monkeypatch.setattr(module, "_slots", counting)
    for sources in (40, 160):
        counted.clear()
        pattern.cache_clear()
        given = tuple(Fraction(1000 + 7 * i) for i in range(sources))
        sizes = [20 + (37 * i) % 101 for i in range(sources)]
        mixed = mixture(sizes, given, "renormalise", samples=10**9)
        assert len(mixed.phases) > sources // 2
        assert mixed.end == sum(sizes)
        # Twice, as the computed part of a pattern doubles; and 64 slots at least in each phase.
        assert len(counted) <= 2 * mixed.end + 64 * len(mixed.phases)
    pattern.cache_clear()
