"""The plan and the statistics of `benchmarks/choose_defaults.py`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import ROOT

from dtt.base.errors import ConfigError
from dtt.config.load import resolve


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The modules of the measurement, in `benchmarks/`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import choose_defaults
    import trial_runner
    import trial_statistics

    yield SimpleNamespace(run=choose_defaults, runner=trial_runner, statistics=trial_statistics)
    sys.path.remove(str(ROOT / "benchmarks"))


def test_all_columns_of_the_design_are_balanced_and_orthogonal(scripts: SimpleNamespace) -> None:
    rows = scripts.statistics.plackett_burman()
    columns = list(zip(*rows, strict=True))
    assert (len(rows), len(columns)) == (12, 11)
    assert {value for row in rows for value in row} == {-1, 1}
    assert [sum(column) for column in columns] == [0] * 11
    for a, b in combinations(columns, 2):
        assert sum(x * y for x, y in zip(a, b, strict=True)) == 0


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


def plan(scripts: SimpleNamespace) -> Any:
    return scripts.run.Plan(scripts.run.PLAN.read_bytes(), smoke=False)


def test_every_planned_setting_is_valid(scripts: SimpleNamespace) -> None:
    planned = plan(scripts)
    assert planned.design[-1] == planned.today
    settings = [(planned.config("screen"), planned.setting(levels)) for levels in planned.design]
    settings += [("novels", planned.setting(planned.today, "novels"))]
    for phase in ("tune-adamw", "tune-adamw-novels"):
        settings += [(planned.config(phase), setting) for setting in planned.grid(phase)]
    assert len(settings) == 12 + 1 + 12 + 6
    for config, setting in settings:
        overrides = [f"{key}={value}" for key, value in setting.overrides.items()]
        assert "horizon" in resolve(config, overrides).config.optim.weight_decay


def test_todays_setting_is_that_of_the_shipped_configuration_before_the_measurement(
    scripts: SimpleNamespace,
) -> None:
    planned = plan(scripts)
    assert planned.setting(planned.today).changes == "today's settings"
    lr, horizon = (float(planned.level(factor, -1)) for factor in ("lr", "horizon"))
    assert 1 / (lr * horizon * 500) == pytest.approx(0.1)
    assert 1 / (lr * float(planned.level("horizon", -1, "novels")) * 300) == pytest.approx(0.1)


def test_only_phases_that_compare_settings_share_seeds(scripts: SimpleNamespace) -> None:
    seeds = {phase: set(plan(scripts).seeds(phase)) for phase in plan(scripts).content["phases"]}
    assert seeds["confirm"] == seeds["adamw"] < seeds["noise"]
    assert seeds["transfer"] == seeds["adamw-novels"]
    choices = ("noise", "screen", "tune-adamw", "transfer", "tune-adamw-novels", "times")
    assert all(not seeds[a] & seeds[b] for a, b in combinations(choices, 2))


def test_runs_with_another_plan_are_refused_and_finished_ones_are_not_repeated(
    scripts: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "record.jsonl"
    record = scripts.runner.TrialRecord(path)
    record.start({"plan": "a"})
    record.start({"tokens of quickstart": "key"})
    outcome = scripts.runner.Outcome([(0, 8.3), (4, 7.5)], True, 0.25, 12.0)
    record.add("noise/today-40", outcome)
    again = scripts.runner.TrialRecord(path)
    assert again["noise/today-40"] == outcome
    assert "noise/today-41" not in again
    again.start({"plan": "a"})
    with pytest.raises(ConfigError, match="these have changed: plan"):
        again.start({"plan": "b"})
    with path.open("a") as file:
        file.write('{"run": "noise/tod')  # a crash while it was written
    again = scripts.runner.TrialRecord(path)
    again.start({"plan": "a"})
    assert again["noise/today-40"] == outcome
    assert path.read_text().endswith("}\n")
    trial = scripts.runner.Trial("noise/today-40", "quickstart", {})
    scripts.runner.TrialRunner(tmp_path, again, threads=1).train([trial], tmp_path)
    assert not (tmp_path / "jobs").exists()
