"""Stretches of time and moments: what they mean, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dtt.config.budget import moment, seconds
from dtt.config.load import resolve
from dtt.errors import ConfigError


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [("6h", 21_600), ("90m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172_800), ("45s", 45)],
)
def test_a_stretch_of_time_is_numbers_with_units(stretch: str, expected: float) -> None:
    assert seconds(stretch) == expected


def test_a_time_of_day_is_the_next_one() -> None:
    noon = datetime(2026, 11, 21, 12, 0).astimezone()
    for text, day, hour in [("13:30", 21, 13), ("07:30", 22, 7), ("12:30", 21, 12)]:
        expected = noon.replace(day=day, hour=hour, minute=30)
        assert moment(text, noon.timestamp()) == expected.timestamp()
    assert moment("12:00", noon.timestamp()) == noon.replace(day=22).timestamp()


def test_a_time_may_name_its_zone() -> None:
    expected = datetime(2026, 11, 22, 5, 0, tzinfo=UTC).timestamp()
    assert moment("2026-11-22 07:00+02:00", 0.0) == expected
    told = resolve(None, ["train.finish_by=2026-11-22T07:00:00+02:00"], env={}).config.train
    assert moment(str(told.finish_by), 0.0) == expected  # YAML knows times, too


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("train.budget=six hours", "train.budget: must be a stretch of time: 6h, 90m"),
        ("train.budget=6", "train.budget: input should be a valid string"),
        ("train.finish_by=25:00", "train.finish_by: must be a time of day"),
        ("train.finish_by=tomorrow", "train.finish_by: must be a time of day"),
    ],
)
def test_what_is_no_time_is_refused_with_the_forms(argument: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(None, [argument], env={})


def test_only_a_decay_that_can_begin_at_any_time_fits_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"train.budget: needs schedule.type=wsd, not cosine"):
        resolve(None, ["train.budget=6h", "schedule.type=cosine"], env={})
