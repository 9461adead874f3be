"""The results of all benchmarks in a folder, as rows of a table beside published results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from dtt.base.errors import DttError
from dtt.base.log import log
from dtt.bench.bench_result import BenchResult, Spread
from dtt.bench.recipe import RecipeFile, ReferencePoint

FOLDER = Path("jobs/bench")
HEAD = ("recipe", "date", "runs", "score", "steps", "tokens", "by", "hardware", "remarks")
Row = tuple[str, ...]


def results(folder: Path = FOLDER, recipe: str = "*") -> list[tuple[str, BenchResult]]:
    """Return the results in `folder` as (folder of the result, result), oldest first.

    Damaged ones are left out, with a warning.
    """
    found: list[tuple[str, BenchResult]] = []
    for path in folder.glob(f"{recipe}/*/{BenchResult.filename}"):
        try:
            found.append((str(path.parent), BenchResult.read(path.parent)))
        except DttError as error:
            log.warning("%s", error)
    return sorted(found, key=lambda pair: datetime.fromisoformat(pair[1].started))


def table(files: Sequence[RecipeFile], found: Sequence[tuple[str, BenchResult]]) -> list[Row]:
    """Return the rows of a table with its head: for each recipe, published results and ours.

    Results of recipes that are not among `files` come last.
    """
    rows: list[Row] = [HEAD]
    names = dict.fromkeys([*(file.name for file in files), *(one.recipe for _, one in found)])
    points = {file.name: file.recipe.references for file in files}
    for name in names:
        rows += (_published(name, point) for point in points.get(name, ()))
        rows += (row(result) for _, result in found if result.recipe == name)
    return rows


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
    """Yield facts about a result as (name, text): value, interval, test, comparison, remarks."""
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
    if (one := result.compared) is not None:
        unit = score.label if score.target is None else "seconds"
        interval = f"95 % interval {one.low:+.4f} to {one.high:+.4f}"
        outcome = "differs" if one.differs else "no difference is shown"
        text = f"{one.difference:+.4f} {unit}, {interval}: {outcome}"
        yield f"since {one.result.rpartition('/')[2]}", text
    for remark in result.remarks:
        yield "remark", remark
