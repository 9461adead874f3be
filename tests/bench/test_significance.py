"""Intervals and tests agree with published tables and examples."""

from __future__ import annotations

import pytest

from dtt.bench.significance import mean_interval, t_cdf, t_quantile


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
    found = mean_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert found.value == 2.0
    assert found.high - 2.0 == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert found.low + found.high == pytest.approx(4.0)
    assert mean_interval([1.0]) is None
