"""Schedules: shapes, joints, end points, and nothing but progress decides."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtt.config.schedule import Schedule
from dtt.optim.lr_curves import (
    ConstantConfig,
    CosineConfig,
    Decaying,
    InverseSqrtConfig,
    LinearConfig,
    WsdConfig,
)
from dtt.optim.resolved_schedule import ResolvedSchedule, resolve_schedule

PER_STEP = 1024

lengths = st.one_of(
    st.integers(0, 400),
    st.just(0.0) | st.floats(1e-38, 1),
    st.integers(0, 100).map("{}%".format),
    st.integers(0, 400).map("{}k tokens".format),
)
floors = st.floats(0.01, 1)
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(ConstantConfig, warmup=lengths),
    st.builds(LinearConfig, warmup=lengths, floor=floors),
    st.builds(CosineConfig, warmup=lengths, floor=floors),
    st.builds(InverseSqrtConfig, warmup=lengths),
    st.builds(
        WsdConfig,
        warmup=lengths,
        decay=lengths,
        floor=floors,
        shape=st.sampled_from(["1-sqrt", "linear", "cosine", "exponential"]),
    ),
)


def growing(step: int) -> int:
    """Tokens before a step, of batches that double at step 100."""
    return PER_STEP * (step + max(0, step - 100))


def set_against(config: Schedule, steps: int) -> ResolvedSchedule:
    return resolve_schedule(config, steps, lambda step: PER_STEP * step)


def lowest(config: Schedule) -> float:
    return config.floor if isinstance(config, Decaying) else 0.0


def largest_fall(schedule: ResolvedSchedule, config: Schedule) -> float:
    """The most a curve can fall from one step to the next, by its steepest place."""
    assert schedule.decay is not None
    share = 1 / (schedule.decay.end - schedule.decay.begin)
    if isinstance(config, InverseSqrtConfig):
        return 0.5 / max(1, schedule.warmup)  # the slope of sqrt(w / u) at u = w
    floor = lowest(config)
    above = 1 - floor
    return {
        "linear": above * share,
        "cosine": above * share * math.pi / 2,
        "1-sqrt": above * math.sqrt(share),
        "exponential": 1 - floor**share,
    }[schedule.name]


@given(schedules, st.integers(1, 400))
def test_the_rate_rises_then_falls_without_a_jump_to_the_neighbour_of_its_floor(
    config: Schedule, steps: int
) -> None:
    schedule = resolve_schedule(config, steps, growing)
    rates = [schedule.multiplier(step) for step in range(steps)]
    warm = min(schedule.warmup, steps)
    assert rates[:warm] == pytest.approx([(n + 1) / schedule.warmup for n in range(warm)])
    if warm < steps:
        assert rates[max(0, warm - 1)] == 1.0
    if schedule.decay is None:
        assert set(rates[schedule.warmup :]) <= {1.0}
        return
    begin = schedule.decay.begin
    assert begin >= warm - 1
    assert rates[begin] == 1.0
    fall = largest_fall(schedule, config) + 1e-9
    assert all(-1e-12 <= a - b <= fall for a, b in pairwise(rates[begin:]))
    if isinstance(config, InverseSqrtConfig):
        assert rates[-1] == pytest.approx(math.sqrt(max(1, warm) / steps))
    else:
        assert lowest(config) - 1e-12 <= rates[-1] <= lowest(config) + fall
        assert schedule.multiplier(steps) == pytest.approx(lowest(config))  # would come next


@given(schedules, st.integers(1, 400), st.randoms())
def test_a_resume_at_any_step_does_not_change_the_schedule(
    config: Schedule, steps: int, random: Any
) -> None:
    whole = [set_against(config, steps).multiplier(step) for step in range(steps)]
    order = random.sample(range(steps), steps)
    again = set_against(config, steps)
    assert {step: again.multiplier(step) for step in order} == dict(enumerate(whole))


@pytest.mark.parametrize("decay", [25, 0.25, "25%", "25.6k tokens"])
def test_a_length_is_steps_or_a_share_or_tokens(decay: Any) -> None:
    schedule = set_against(WsdConfig(warmup=10, decay=decay, floor=0.1), 100)
    assert schedule.multiplier(74) == schedule.multiplier(75) == 1.0
    assert schedule.multiplier(84) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(9 / 25)))
    assert schedule.describe() == (
        "warm-up until step 10, decay (1-sqrt) from step 76, 11.8% of the peak in step 100"
    )


def test_lengths_in_tokens_follow_a_batch_that_grows() -> None:
    schedule = resolve_schedule(
        WsdConfig(warmup="51.2k tokens", decay="51.2k tokens"), 200, growing
    )
    assert schedule.warmup == 50
    assert schedule.decay is not None
    assert schedule.decay.begin == 175


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        (CosineConfig(floor=0.1), 50, 0.55),
        (LinearConfig(), 25, 0.75),
        (InverseSqrtConfig(warmup=10), 39, 0.5),
        (InverseSqrtConfig(), 99, 0.1),
        (WsdConfig(decay=0.5, shape="linear"), 75, 0.5),
        (WsdConfig(decay=0.5, shape="cosine"), 75, 0.5),
        (WsdConfig(decay=0.5, shape="exponential", floor=0.01), 75, 0.1),
        (WsdConfig(decay=1.0), 25, 0.5),
    ],
)
def test_each_curve_is_its_formula(config: Schedule, step: int, expected: float) -> None:
    assert set_against(config, 100).multiplier(step) == pytest.approx(expected)
