"""Stretches of time and moments: what they mean, and what is refused."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from dtt.base.errors import ConfigError
from dtt.config.budget import moment, seconds
from dtt.config.load import resolve


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


def test_a_time_of_day_is_that_of_the_clock_after_a_change_of_summer_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        evening = datetime(2026, 10, 24, 20, tzinfo=UTC)  # 22:00 there, and the clock goes back
        assert moment("07:00", evening.timestamp()) == evening.replace(day=25, hour=6).timestamp()
    time.tzset()


def test_a_time_may_name_its_zone() -> None:
    expected = datetime(2026, 11, 22, 5, 0, tzinfo=UTC).timestamp()
    assert moment("2026-11-22 07:00+02:00", 0.0) == expected
    reported = resolve(None, ["train.finish_by=2026-11-22T07:00:00+02:00"], env={}).config.train
    assert moment(str(reported.finish_by), 0.0) == expected  # YAML knows times, too


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("train.budget=six hours", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=6", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=0h", "train.budget: must be a duration of at most 10000d: 6h, 90m"),
        ("train.budget=10001d", "train.budget: must be a duration of at most 10000d"),
        ("train.finish_by=25:00", "train.finish_by: must be a time of day"),
        ("train.finish_by=tomorrow", "train.finish_by: must be a time of day"),
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
