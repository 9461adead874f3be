"""The plan and the statistics of `benchmarks/choose_defaults.py`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ROOT

from dtt.config.load import resolve


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The modules of the measurement, in `benchmarks/`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import choose_defaults
    import trial_statistics

    yield SimpleNamespace(run=choose_defaults, statistics=trial_statistics)
    sys.path.remove(str(ROOT / "benchmarks"))


def test_all_columns_of_the_design_are_balanced_and_orthogonal(scripts: SimpleNamespace) -> None:
    rows = scripts.statistics.plackett_burman()
    columns = list(zip(*rows, strict=True))
    assert (len(rows), len(columns)) == (12, 11)
    assert {value for row in rows for value in row} == {-1, 1}
    assert [sum(column) for column in columns] == [0] * 11
    for a, b in combinations(columns, 2):
        assert sum(x * y for x, y in zip(a, b, strict=True)) == 0


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (4, 2.776445), (5, 2.570582), (8, 2.306004), (11, 2.200985)],
)
def test_quantiles_of_student_t_are_those_of_the_tables(
    scripts: SimpleNamespace, freedom: int, quantile: float
) -> None:
    assert scripts.statistics.t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)
    assert scripts.statistics.t_cdf(-quantile, freedom) == pytest.approx(0.025, abs=1e-8)
    assert scripts.statistics.t_cdf(0.0, freedom) == 0.5


def test_a_paired_difference_is_students_sleep_data(scripts: SimpleNamespace) -> None:
    """t = 4.0621, p = 0.002833, interval 0.70 to 2.46 (R: t.test(paired = TRUE))."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    estimate = scripts.statistics.paired(second, first)
    assert estimate.value / estimate.error == pytest.approx(4.0621, abs=1e-4)
    assert estimate.p == pytest.approx(0.002833, abs=1e-6)
    assert estimate.interval() == pytest.approx((0.7001142, 2.4598858), abs=1e-6)


def test_holm_multiplies_by_the_number_of_hypotheses_left_and_never_decreases(
    scripts: SimpleNamespace,
) -> None:
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.6}
    assert scripts.statistics.holm(p) == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.6})
    assert scripts.statistics.holm({"a": 0.7, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_effects_are_recovered_and_differences_between_seeds_cancel(
    scripts: SimpleNamespace,
) -> None:
    design = scripts.statistics.plackett_burman()
    noise = [(-1) ** i * 0.01 for i in range(12)]
    outcomes = [
        [3 - 0.02 * row[0] + 0.05 * row[3] + n, 4 - 0.02 * row[0] + 0.05 * row[3] - n]
        for row, n in zip(design, noise, strict=True)
    ]
    effects = scripts.statistics.main_effects(design, outcomes)
    assert [e.value for e in effects] == pytest.approx([-0.04, 0, 0, 0.1] + [0] * 7, abs=1e-12)
    # Residuals of ±0.01 in all 24 runs, 11 degrees of freedom.
    assert effects[0].freedom == 11
    assert effects[0].error == pytest.approx(2 * math.sqrt(24 * 0.01**2 / 11 / 24))


def test_curves_are_interpolated_between_evaluations(scripts: SimpleNamespace) -> None:
    curve = [(0, 8.0), (25, 4.0), (50, 3.0)]
    assert scripts.statistics.crossing(curve, 3.5) == 37.5
    assert scripts.statistics.crossing(curve, 3.0) == 50
    assert scripts.statistics.crossing(curve, 2.9) is None
    assert scripts.statistics.value_at(curve, 37.5) == 3.5
    assert scripts.statistics.value_at(curve, 50) == 3.0


def test_every_planned_setting_is_valid(scripts: SimpleNamespace) -> None:
    plan = scripts.run.Plan(scripts.run.PLAN.read_bytes(), smoke=False)
    assert len(plan.factors) == 8
    assert plan.design[-1] == plan.today
    for phase, settings in {"screen": plan.design, "transfer": [plan.today]}.items():
        config = plan.content["phases"][phase]["config"]
        for levels in settings:
            values = plan.overrides(phase, levels, seed=1)
            cfg = resolve(config, [f"{key}={value}" for key, value in values.items()]).config
            assert cfg.optim.weight_decay.startswith(("horizon", "cautious horizon"))


def test_no_seed_is_used_by_two_phases(scripts: SimpleNamespace) -> None:
    plan = scripts.run.Plan(scripts.run.PLAN.read_bytes(), smoke=False)
    seeds = [seed for phase in plan.content["phases"].values() for seed in phase["seeds"]]
    assert len(seeds) == len(set(seeds)) == 9 + 2 + 6 + 5


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of the repository")
def test_a_plan_that_changes_after_the_first_run_is_refused(
    scripts: SimpleNamespace, tmp_path: Path
) -> None:
    plan = scripts.run.Plan(scripts.run.PLAN.read_bytes(), smoke=True)
    measurement = scripts.run.Measurement(plan, tmp_path)
    measurement.check_unchanged()
    measurement.check_unchanged()
    other = scripts.run.Measurement(scripts.run.Plan(plan.text + b"# more\n", smoke=True), tmp_path)
    with pytest.raises(scripts.run.ConfigError, match="these have changed: plan"):
        other.check_unchanged()
    with pytest.raises(scripts.run.ConfigError, match="has changed since the first run"):
        other.check_plan()
