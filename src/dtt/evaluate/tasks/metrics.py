"""Metrics of benchmark tasks, with standard errors.

Every metric is an estimate from a sample of independent questions; for rolling likelihood, a
question is a document. Next to its value, an estimate has the influence of each question: the
derivative of the value with respect to the weight of the question, n times. For a mean, this is the
question's own value; for perplexities and ratios of sums, it is the linearisation of the delta
method. The standard error of every metric is then that of the mean of its influences, and the
standard error of a difference between two models that of the mean of the paired differences. The
bootstrap converges to the same values, but needs thousands of passes and a seed.

The answers of two models to the same question are correlated, so the standard error of a difference
is usually much smaller than the errors of the two values suggest (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

AnswerRecord = dict[str, Any]
"""The answer to one question, a line of a result file; result_files.py lists its fields."""

NORMAL_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
MAX_EXPONENT = 700.0
"""Largest exponent of a perplexity; beyond it, floats overflow."""


@dataclass(frozen=True)
class Score:
    """The value of a metric."""

    value: float
    stderr: float | None
    """Standard error; None with fewer than two questions."""
    n: int
    """Number of questions."""


@dataclass(frozen=True)
class MetricEstimate:
    """The value of a metric, and the influence of each question on it."""

    value: float
    influences: Sequence[float]

    @property
    def score(self) -> Score:
        """The value with its standard error."""
        return Score(self.value, mean_stderr(self.influences), len(self.influences))


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: metrics, and counts of questions that need a reader's attention."""

    task: str
    scores: Mapping[str, Score]
    n: int
    """Number of questions."""
    truncated: int
    """Number of questions that did not fit into the model's context and lost their beginning."""
    separate: int
    """Number of questions with a continuation that had to be encoded without its context."""
    ties: int
    """Number of questions for which several options have the largest log-likelihood."""
    unfinished: int = 0
    """Number of generated replies that ended within their reasoning."""

    def dump(self) -> dict[str, Any]:
        """Return the result as a JSON value."""
        return asdict(self)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> TaskResult:
        """Return the result of a JSON value that `dump` returned."""
        scores = {name: Score(**score) for name, score in content["scores"].items()}
        return cls(**{**content, "scores": scores})


def task_result(
    task: str, type: str, chance: float | None, records: Sequence[AnswerRecord]
) -> TaskResult:
    """Return the result of a task from the records of all of its questions."""
    keys = {"truncated": "truncated", "separate": "separate", "ties": "tie"}
    keys["unfinished"] = "unfinished"
    counts = {name: sum(bool(one.get(key)) for one in records) for name, key in keys.items()}
    found = estimates(type, chance, records)
    scores = {name: estimate.score for name, estimate in found.items()}
    return TaskResult(task, scores, len(records), **counts)


def estimates(
    type: str, chance: float | None, records: Sequence[AnswerRecord]
) -> dict[str, MetricEstimate]:
    """Return the metrics of a task of a `type` (`Task.type`) by name.

    Definitions of `acc`, `acc_norm`, `acc_bytes`, `perplexity`, `word_perplexity` and
    `byte_perplexity` equal those of lm-evaluation-harness 0.4.13. `centred` is (acc - chance) /
    (1 - chance); without `chance`, it is left out. `bits_per_byte` is the mean over questions for
    the gold answer; for rolling likelihood, total bits / total bytes.
    """
    if not records:
        return {}
    match type:
        case "rolling":
            if not any(record["bytes"] for record in records):  # all documents are empty
                return {}
            total = [-record["log_likelihood"] for record in records]
            of_byte = _ratio(total, [record["bytes"] for record in records])
            return {
                "bits_per_byte": _scaled(of_byte, lambda nats: nats / math.log(2)),
                **_perplexity("byte_perplexity", of_byte),
                **_perplexity(
                    "word_perplexity", _ratio(total, [record["words"] for record in records])
                ),
            }
        case "generation":
            return {"exact_match": _mean(float(record["exact_match"]) for record in records)}
        case "cloze":
            found = {
                "acc": _mean(float(record["greedy"][record["gold"]]) for record in records),
                **_perplexity("perplexity", _mean(map(_gold_nats, records))),
            }
        case "schema":  # all options have the same continuation, so lengths do not matter
            found = {"acc": _accuracy(records, None)}
        case "multiple_choice":
            found = {
                "acc": _accuracy(records, None),
                "acc_norm": _accuracy(records, "characters"),
                "acc_bytes": _accuracy(records, "bytes"),
            }
        case _:
            raise ValueError(type)
    if chance is not None:
        found["centred"] = _scaled(found["acc"], lambda acc: (acc - chance) / (1 - chance))
    found["bits_per_byte"] = _mean(
        _gold_nats(record) / math.log(2) / max(1, record["answer_bytes"]) for record in records
    )
    return found


def _gold_nats(record: AnswerRecord) -> float:
    return -float(record["log_likelihoods"][record["gold"]])


def has_tie(log_likelihoods: Sequence[float]) -> bool:
    """Return True if several options have the largest log-likelihood."""
    return log_likelihoods.count(max(log_likelihoods)) > 1


def count_words(text: str) -> int:
    """Return the number of words of a text, as lm-evaluation-harness counts them."""
    return len(re.split(r"\s+", text))


def mean_stderr(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent values; None if there is only one."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _chosen(record: AnswerRecord, lengths: str | None) -> int:
    """Return the option with the largest log-likelihood per unit of length, the first of equals."""
    scores = record["log_likelihoods"]
    if lengths is not None:
        scores = [
            score / length if length else -math.inf
            for score, length in zip(scores, record[lengths], strict=True)
        ]
    return int(max(range(len(scores)), key=scores.__getitem__))


def _accuracy(records: Sequence[AnswerRecord], lengths: str | None) -> MetricEstimate:
    return _mean(float(_chosen(record, lengths) == record["gold"]) for record in records)


def _mean(values: Iterable[float]) -> MetricEstimate:
    influences = list(values)
    return MetricEstimate(math.fsum(influences) / len(influences), influences)


def _ratio(above: Sequence[float], below: Sequence[float]) -> MetricEstimate:
    """Return the ratio of two sums: a mean over units that questions have in different numbers."""
    total, n = math.fsum(below), len(below)
    ratio = math.fsum(above) / total
    return MetricEstimate(
        ratio, [(a - ratio * b) * n / total for a, b in zip(above, below, strict=True)]
    )


def _scaled(estimate: MetricEstimate, line: Callable[[float], float]) -> MetricEstimate:
    """Apply a linear function to an estimate."""
    return MetricEstimate(line(estimate.value), [line(x) for x in estimate.influences])


def _perplexity(name: str, nats: MetricEstimate) -> dict[str, MetricEstimate]:
    """Return the perplexity, exp(nats per unit). Left out if a float cannot hold it."""
    if nats.value > MAX_EXPONENT:
        return {}
    value = math.exp(nats.value)
    return {name: MetricEstimate(value, [value * x for x in nats.influences])}


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a metric between two models: second minus first."""

    first: float
    second: float
    difference: float
    stderr: float | None
    """Standard error of the difference; None with fewer than two questions."""
    n: int
    """Number of questions that both models have answered."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the difference; None with fewer than two questions."""
        if self.stderr is None:
            return None
        reach = NORMAL_95 * self.stderr
        return self.difference - reach, self.difference + reach


def compare(
    type: str,
    chance: float | None,
    first: Sequence[AnswerRecord],
    second: Sequence[AnswerRecord],
) -> dict[str, PairedDifference]:
    """Return the difference of each metric, over the questions that both sequences contain.

    `type` and `chance` are those of the task.
    """
    # By id: the two files may have the questions in another order, or other ones.
    others = {record["id"]: record for record in second}
    ours = [record for record in first if record["id"] in others]
    theirs = [others[record["id"]] for record in ours]
    of_first, of_second = estimates(type, chance, ours), estimates(type, chance, theirs)
    found: dict[str, PairedDifference] = {}
    for metric in [metric for metric in of_first if metric in of_second]:
        a, b = of_first[metric], of_second[metric]
        pairs = list(zip(a.influences, b.influences, strict=True))
        stderr = mean_stderr([y - x for x, y in pairs])
        found[metric] = PairedDifference(a.value, b.value, b.value - a.value, stderr, len(ours))
    return found


def noise(values: Sequence[float]) -> float | None:
    """Return the relative standard deviation of a metric over successive checkpoints.

    This is the noise of arXiv 2508.13144. None with fewer than two values, or if their mean is 0.
    """
    n = len(values)
    mean = math.fsum(values) / n if n else 0.0
    if n < 2 or mean == 0:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) / abs(mean)
