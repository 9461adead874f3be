"""Schedules: shapes, end points, and nothing but progress decides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtt.config.optim import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    ScheduleConfig,
    WsdConfig,
)
from dtt.optim.schedule import multiplier

schedules: st.SearchStrategy[ScheduleConfig] = st.one_of(
    st.builds(ConstantConfig, warmup_steps=st.integers(0, 50)),
    st.builds(LinearConfig, warmup_steps=st.integers(0, 50), floor=st.floats(0, 1)),
    st.builds(CosineConfig, warmup_steps=st.integers(0, 50), floor=st.floats(0, 1)),
    st.builds(
        WsdConfig,
        warmup_steps=st.integers(0, 50),
        floor=st.floats(0, 1),
        decay=st.floats(0, 1),
        shape=st.sampled_from(["linear", "1-sqrt"]),
    ),
)


@given(schedules, st.integers(50, 300))
def test_the_rate_rises_once_then_never_rises_and_stays_within_its_bounds(
    schedule: ScheduleConfig, steps: int
) -> None:
    rates = [multiplier(schedule, step, steps) for step in range(steps)]
    floor = getattr(schedule, "floor", 0.0)
    warm = schedule.warmup_steps
    assert rates[:warm] == sorted(rates[:warm])
    assert all(a >= b - 1e-12 for a, b in zip(rates[warm:], rates[warm + 1 :], strict=False))
    assert all(floor - 1e-12 <= rate <= 1.0 for rate in rates[warm:])
    assert max(rates) == 1.0


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    schedule = ConstantConfig(warmup_steps=4)
    assert [multiplier(schedule, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_wsd_is_stable_then_decays_in_its_share_of_the_run() -> None:
    schedule = WsdConfig(warmup_steps=10, decay=0.25, floor=0.1)
    assert multiplier(schedule, 74, 100) == multiplier(schedule, 75, 100) == 1.0
    assert multiplier(schedule, 84, 100) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(9 / 25)))
    linear = WsdConfig(decay=0.5, shape="linear")
    assert multiplier(linear, 75, 100) == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle() -> None:
    assert multiplier(CosineConfig(floor=0.1), 50, 100) == pytest.approx(0.55)


def test_linear_goes_straight_to_its_floor() -> None:
    assert multiplier(LinearConfig(), 25, 100) == pytest.approx(0.75)
