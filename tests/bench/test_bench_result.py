"""Results are tested against their target, and shown in a table."""

from __future__ import annotations

from typing import Any

import pytest

from dtt.bench import score_table
from dtt.bench.bench_result import (
    BenchResult,
    DataFacts,
    RunResult,
    Spread,
    remarks,
    target_test,
)
from dtt.bench.machine import MachineFacts, this_machine
from dtt.bench.recipe import ScoreRule, find, shipped

MACHINE = MachineFacts(cpu="A", cores=2, memory=2**33, gpus={}, torch="2.13")
H100 = MACHINE.model_copy(update={"gpus": {"NVIDIA H100 80GB HBM3": 8}})
LOSS = ScoreRule(metric="eval.loss", label="loss", target=3.28, margin=0.004)
BITS = ScoreRule(metric="eval.bits_per_byte", label="bits per byte")


def a_run(seed: int, value: float, rule: ScoreRule, attempts: int = 1) -> RunResult:
    return RunResult(
        job=f"seed-{seed}", seed=seed, step=100, tokens=10**6, seconds=100.0 * value, value=value,
        reached=None if rule.target is None else rule.reached(value), best=value, beside={},
        attempts=attempts,
    )  # fmt: skip


def result(values: list[float], rule: ScoreRule = BITS, **changes: Any) -> BenchResult:
    runs = tuple(a_run(seed, value, rule) for seed, value in enumerate(values))
    facts: dict[str, Any] = {
        "recipe": "laptop", "recipe_key": "0" * 64, "started": "2026-11-20T10:00:00+01:00",
        "overrides": (), "changed": {}, "config_sha256": "1" * 64, "version": "1.0", "code": None,
        "machine": MACHINE, "score": rule, "runs": runs, "value": Spread.of(values),
        "data": DataFacts(source="python-stdlib", revision=None, key="k", files=()),
        "seconds": Spread.of([100.0 * value for value in values]), "steps": Spread.of([100]),
        "tokens": Spread.of([10**6]), "beside": {}, "target_test": target_test(rule, values),
        "resumed": False, "official": False,
        "remarks": ("not an official record",),
    }  # fmt: skip
    return BenchResult(**(facts | changes))


def test_the_rule_of_the_speedrun() -> None:
    """(3.28 - 3.277) * sqrt(4) = 0.006."""
    found = target_test(LOSS, [3.276, 3.278, 3.277, 3.277])
    assert found is not None
    assert found.statistic == pytest.approx(0.006)
    assert found.significant is True
    close = target_test(LOSS, [3.278, 3.279])
    assert close is not None
    assert close.significant is False
    missed = target_test(LOSS, [3.2, 3.2, 3.2, 3.3])
    assert missed is not None
    assert missed.statistic == pytest.approx(0.11)
    assert missed.significant is False, "one run has missed the target"


def test_one_run_claims_no_significance() -> None:
    found = target_test(LOSS, [3.2])
    assert found is not None
    assert found.statistic == pytest.approx(0.08)
    assert found.significant is None
    assert Spread.of([3.2]).low is None
    text = dict(score_table.summary(result([3.2])))
    assert "one run: no significance is claimed" in text["bits per byte"]


def test_without_a_margin_the_interval_of_the_mean_must_lie_beyond_the_target() -> None:
    core = ScoreRule(metric="task.*.centred", label="CORE", goal="max", target=0.25)
    above = target_test(core, [0.26, 0.261, 0.262])
    assert above is not None
    assert above.significant is True
    assert above.statistic == pytest.approx(0.261 - 4.3027 * 0.001 / 3**0.5, abs=1e-5)
    noisy = target_test(core, [0.24, 0.26, 0.28])
    assert noisy is not None
    assert noisy.significant is False
    assert target_test(BITS, [1.0, 2.0]) is None


def test_a_record_needs_the_hardware_the_recipe_and_all_runs() -> None:
    file = find("fineweb-3.28")
    runs = [a_run(seed, 3.2, LOSS) for seed in range(4)]
    plain = remarks(file, H100, runs, {})
    assert plain == ("not an official record", *file.recipe.differences)
    assert "other hardware: 2 cores, A" in remarks(file, MACHINE, runs, {})
    assert "changed: train.steps" in remarks(file, H100, runs, {"train.steps": 5})
    assert "3 of 4 runs" in remarks(file, H100, runs[:3], {})
    missed = [*runs[:3], a_run(3, 3.3, LOSS)]
    assert "target not reached by 1 of 4 runs" in remarks(file, H100, missed, {})
    again = [*runs[:3], a_run(3, 3.2, LOSS, attempts=2)]
    assert "runs were interrupted and resumed" in remarks(file, H100, again, {})


def test_the_table_has_published_results_beside_ours() -> None:
    missed = result([3.27, 3.4], LOSS, recipe="fineweb-3.28", resumed=True)
    reached = result([3.27, 3.26], LOSS, recipe="fineweb-3.28", changed={"train.steps": 5})
    rows = score_table.table(shipped(), missed, reached, result([1.0, 2.0]))
    by_recipe = [row for row in rows if row[0] == "fineweb-3.28"]
    assert [row[6] for row in by_recipe[:2]] == ["llm.c", "modded-nanogpt #89"]
    assert by_recipe[2][3] == "loss 3.3350 ± 0.0919"
    assert "target not reached by 1 of 2 runs, best 3.2700; resumed" in by_recipe[2][8]
    assert by_recipe[3][3].startswith("5.44 ± 0.01 min to loss 3.28; loss 3.2650")
    assert "significant; changed; not an official record" in by_recipe[3][8]
    assert [row[3] for row in rows if row[0] == "laptop"] == ["bits per byte 1.5000 ± 0.7071"]
    assert all(len(row) == len(score_table.HEAD) for row in rows)


def test_runs_on_the_cpu_have_no_gpus() -> None:
    machine = this_machine("cpu", 0)
    assert machine.gpus == {}
    assert machine.summary.endswith(machine.cpu)
    assert H100.is_like("8 x H100")
    assert not H100.is_like("8 x A100")
    assert not MACHINE.is_like("8 x H100")
