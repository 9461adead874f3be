"""bench.json: the result of a recipe on this machine, and the statistics of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from dtt.artifacts.manifest import FileRecord, Manifest, Record
from dtt.bench.machine import MachineFacts
from dtt.bench.recipe import RecipeFile, ScoreRule
from dtt.bench.significance import mean_interval

UNOFFICIAL = "not an official record"


class RunResult(Record):
    """The score of one run; see `RunScore`."""

    job: str
    seed: int
    step: int
    tokens: int
    seconds: float | None
    value: float
    reached: bool | None
    best: float
    beside: dict[str, float | None]
    attempts: int
    """Number of attempts; more than one: the run was interrupted and resumed."""


class Spread(Record):
    """The mean of a figure over the runs."""

    n: int
    mean: float
    deviation: float | None
    """Standard deviation over the runs; None for one run."""
    low: float | None
    """Lower end of the 95 % confidence interval of the mean; None for one run."""
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        found = mean_interval(values)
        return cls(
            n=len(values),
            mean=statistics.fmean(values),
            deviation=None if found is None else statistics.stdev(values),
            low=None if found is None else found.low,
            high=None if found is None else found.high,
        )


class TargetTest(Record):
    """Test of the hypothesis that the mean of the runs reaches the target."""

    rule: str
    statistic: float | None
    """Left side of the rule; None with one run without a margin."""
    significant: bool | None
    """None with one run, of which no significance is claimed."""


class DataFacts(Record):
    """The data of a recipe."""

    source: str
    revision: str | None
    key: str
    """Hash of the content of all training data and of the tokenizer, as a job records it."""
    files: tuple[FileRecord, ...]


class BenchResult(Manifest):
    """The result of a recipe. `dtt bench` writes it last."""

    filename: ClassVar[str] = "bench.json"
    holds: ClassVar[str] = "benchmark result"
    made_by: ClassVar[str] = "dtt bench"

    format: Literal["dtt-bench-1"] = "dtt-bench-1"
    recipe: str
    recipe_key: str
    """Hash of what is trained and how it is scored; see `RecipeFile.key`."""
    started: str
    """Local time with its offset from UTC, ISO 8601."""
    overrides: tuple[str, ...]
    """Settings given on the command line."""
    changed: dict[str, Any]
    """Keys whose values differ from those of the recipe, on the command line or in the environment,
    and their values."""
    config_sha256: str
    version: str
    code: dict[str, str] | None
    """Commit of dtt, and hash of its uncommitted changes; None outside a clone."""
    machine: MachineFacts
    data: DataFacts
    score: ScoreRule
    runs: tuple[RunResult, ...]
    value: Spread
    seconds: Spread | None
    steps: Spread
    tokens: Spread
    beside: dict[str, Spread | None]
    target_test: TargetTest | None
    resumed: bool
    official: bool
    remarks: tuple[str, ...]
    """Reasons why the result is no official record; the first states that it is none."""

    @property
    def reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(bool(run.reached) for run in self.runs)


def target_test(rule: ScoreRule, values: Sequence[float]) -> TargetTest | None:
    """Test whether the mean of values reaches the target of a recipe; None without a target.

    It is not significant if a run has missed the target.
    """
    if rule.target is None:
        return None
    sign = 1 if rule.goal == "min" else -1
    several, all_reached = len(values) > 1, all(map(rule.reached, values))
    if rule.margin is not None:
        mean, root = statistics.fmean(values), math.sqrt(len(values))
        found = sign * (rule.target - mean) * root
        order = f"{rule.target:g} - mean" if sign > 0 else f"mean - {rule.target:g}"
        return TargetTest(
            rule=f"({order}) * sqrt(n) >= {rule.margin:g}",
            statistic=found,
            significant=all_reached and found >= rule.margin if several else None,
        )
    interval = mean_interval(values)
    bound = None if interval is None else interval.high if sign > 0 else interval.low
    end, order = ("upper", "<=") if sign > 0 else ("lower", ">=")
    return TargetTest(
        rule=f"{end} end of the 95 % confidence interval of the mean {order} {rule.target:g}",
        statistic=bound,
        significant=None if bound is None else all_reached and rule.reached(bound),
    )


def remarks(
    file: RecipeFile, machine: MachineFacts, runs: Sequence[RunResult], changed: dict[str, Any]
) -> tuple[str, ...]:
    """Return why a result is no official record; empty if nothing is known against it."""
    recipe, found = file.recipe, []
    if not recipe.references:
        found.append("there is no official record of this recipe")
    elif not any(machine.is_like(point.hardware) for point in recipe.references):
        found.append(f"other hardware: {machine.summary}")
    found += recipe.differences
    if changed:
        found.append(f"changed: {', '.join(changed)}")
    if len(runs) < recipe.runs:
        found.append(f"{len(runs)} of {recipe.runs} runs")
    if missed := sum(run.reached is False for run in runs):
        found.append(f"target not reached by {missed} of {len(runs)} runs")
    if any(run.attempts > 1 for run in runs):
        found.append("runs were interrupted and resumed")
    return (UNOFFICIAL, *found) if found else ()
