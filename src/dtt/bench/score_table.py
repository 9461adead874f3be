"""The result of a benchmark as a row of a table beside published results, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from dtt.bench.bench_result import BenchResult, Spread
from dtt.bench.recipe import RecipeFile, ReferencePoint

HEAD = ("recipe", "date", "runs", "score", "steps", "tokens", "by", "hardware", "remarks")
Row = tuple[str, ...]


def table(files: Sequence[RecipeFile], *results: BenchResult) -> list[Row]:
    """Return the rows of a table with its head: published results, then `results`."""
    published = [_published(file.name, point) for file in files for point in file.recipe.references]
    return [HEAD, *published, *map(row, results)]


def _published(recipe: str, point: ReferencePoint) -> Row:
    score = f"{point.value:g} {point.unit}"
    return (recipe, point.date, "", score, "", "", point.name, point.hardware, point.source)


def row(result: BenchResult) -> Row:
    """Return the row of a result."""
    code = "" if result.code is None else f" {result.code['commit'][:7]}"
    changes = "+" if result.code is not None and result.code["changes"] else ""
    return (
        result.recipe,
        datetime.fromisoformat(result.started).strftime("%Y-%m-%d %H:%M"),
        str(len(result.runs)),
        "; ".join(_scores(result)),
        f"{result.steps.mean:,.0f}",
        f"{result.tokens.mean / 1e6:,.1f}M",
        f"dtt {result.version}{code}{changes}",
        result.machine.summary,
        "; ".join(_remarks(result)),
    )


def _scores(result: BenchResult) -> Iterator[str]:
    """Yield the score of a result: time to the target and value, then further metrics."""
    score = result.score
    if score.target is not None and result.reached == len(result.runs) and result.seconds:
        yield f"{in_time(result.seconds)} to {score.label} {score.target:g}"
    yield f"{score.label} {in_numbers(result.value)}"
    for name, spread in result.beside.items():
        if spread is not None:
            yield f"{name.removeprefix('eval.').removeprefix('task.')} {in_numbers(spread)}"


def _remarks(result: BenchResult) -> Iterator[str]:
    score, count = result.score, len(result.runs)
    if score.target is not None and result.reached < count:
        best = (min if score.goal == "min" else max)(run.best for run in result.runs)
        yield f"target not reached by {count - result.reached} of {count} runs, best {best:.4f}"
    test = result.target_test
    if test is not None and count == 1:
        yield "one run: no significance"
    elif test is not None and result.reached == count:
        yield "significant" if test.significant else "not significant"
    if result.changed:
        yield "changed"
    if result.resumed:
        yield "resumed"
    if not result.official:
        yield result.remarks[0]


def in_numbers(spread: Spread) -> str:
    """Return a mean and its standard deviation over the runs."""
    deviation = "" if spread.deviation is None else f" ± {spread.deviation:.4f}"
    return f"{spread.mean:.4f}{deviation}"


def in_time(spread: Spread) -> str:
    """Return a mean duration and its standard deviation, in seconds, minutes or hours."""
    unit, size = next(
        (name, size) for name, size in (("h", 3600), ("min", 60), ("s", 1))
        if spread.mean >= 2 * size or size == 1
    )  # fmt: skip
    deviation = "" if spread.deviation is None else f" ± {spread.deviation / size:.2f}"
    return f"{spread.mean / size:.2f}{deviation} {unit}"


def summary(result: BenchResult) -> Iterator[tuple[str, str]]:
    """Yield facts about a result as (name, text): value, interval, test, remarks."""
    score, value = result.score, result.value
    if value.low is not None and value.high is not None:
        interval = f"95 % interval of the mean {value.low:.4f} to {value.high:.4f}"
        yield score.label, f"{in_numbers(value)} over {value.n} runs, {interval}"
    else:
        yield score.label, f"{in_numbers(value)}, one run: no significance is claimed"
    if result.seconds is not None:
        yield "training", f"{in_time(result.seconds)} per run, without pauses"
    if (test := result.target_test) is not None:
        verdict = {True: ", holds", False: ", does not hold", None: ""}
        number = "" if test.statistic is None else f": {test.statistic:.4f}"
        yield "significance", f"{test.rule}{number}{verdict[test.significant]}"
    for remark in result.remarks:
        yield "remark", remark
