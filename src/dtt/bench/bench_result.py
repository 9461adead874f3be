"""bench.json: the result of a recipe on this machine, and the statistics of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from dtt.artifacts.manifest import FileRecord, Manifest, Record
from dtt.bench.machine import MachineFacts
from dtt.bench.recipe import RecipeFile, ScoreRule
from dtt.bench.significance import t_quantile

UNOFFICIAL = "not an official record"
CONFIDENCE = 0.95


class RunResult(Record):
    """The score of one run, at the evaluation that counts."""

    job: str
    seed: int
    step: int
    tokens: int
    """Tokens trained on up to this step."""
    seconds: float | None
    """Seconds of training up to this step; see `training_seconds`."""
    value: float
    reached: bool | None
    """True if the value reaches the target; None without a target."""
    best: float
    """Best value of all evaluations."""
    beside: dict[str, float | None]
    """Further metrics of the same step; None if they were not measured there."""
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
        """Return the spread of at least one value.

        The interval is that of Student, The probable error of a mean, Biometrika 6 (1908).
        """
        n, mean = len(values), statistics.fmean(values)
        if n == 1:
            return cls(n=1, mean=mean, deviation=None, low=None, high=None)
        deviation = statistics.stdev(values)
        half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)
        return cls(n=n, mean=mean, deviation=deviation, low=mean - half, high=mean + half)


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
    spread = Spread.of(values)
    bound = spread.high if sign > 0 else spread.low
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
