"""Intervals and tests agree with published tables and examples."""

from __future__ import annotations

import pytest

from dtt.bench.bench_result import Spread
from dtt.bench.significance import t_cdf, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (4, 2.776445), (5, 2.570582), (8, 2.306004), (11, 2.200985)],
)
def test_quantiles_are_those_of_the_table_of_student(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)
    assert t_cdf(-quantile, freedom) == pytest.approx(0.025, abs=1e-8)
    assert t_cdf(0.0, freedom) == 0.5


def test_the_interval_of_a_mean() -> None:
    """By hand: mean 2, standard deviation 1, standard error 1 / sqrt(3)."""
    found = Spread.of([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5
    assert (found.low, found.mean, found.high) == pytest.approx((2 - half, 2, 2 + half), abs=1e-5)
    assert Spread.of([1.0]).low is None
