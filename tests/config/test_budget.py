"""Stretches of time: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.budget import seconds
from dtt.config.load import resolve


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [("6h", 21_600), ("90m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172_800), ("45s", 45)],
)
def test_a_stretch_of_time_is_numbers_with_units(stretch: str, expected: float) -> None:
    assert seconds(stretch) == expected


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("train.budget=six hours", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=6", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=0h", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=10001d", "train.budget: must be a duration of at most 10000d"),
    ],
)
def test_a_malformed_time_is_refused_with_the_valid_forms(argument: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(None, [argument], env={})


def test_only_a_schedule_that_needs_no_length_fits_a_budget() -> None:
    for argument, why in [
        ("schedule.type=cosine", "train.budget: needs schedule.type=wsd, not cosine"),
        ("schedule.warmup=2%", "schedule.warmup: the time budget determines the length of the run"),
    ]:
        with pytest.raises(ConfigError, match=why):
            resolve(None, ["train.budget=6h", argument], env={})
