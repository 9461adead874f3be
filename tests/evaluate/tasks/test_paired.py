"""Paired comparisons use the questions that both models have answered."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from dtt.evaluate.tasks.metrics import compare, mcnemar, noise


@pytest.mark.parametrize(
    "counts", [(0, 0), (1, 0), (3, 9), (20, 20), (7, 17), (900, 1000)], ids=str
)
def test_discordant_questions_get_the_exact_binomial_test_of_scipy(
    counts: tuple[int, int],
) -> None:
    stats = pytest.importorskip("scipy.stats")
    exact = stats.binomtest(min(counts), sum(counts), 0.5).pvalue if sum(counts) else 1.0
    assert mcnemar(*counts) == pytest.approx(exact, rel=1e-12)
    assert mcnemar(*counts) == mcnemar(*counts[::-1])


def test_the_test_is_exact_and_linear_in_the_number_of_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations, frexp = [], math.frexp

    def counted(x: float) -> tuple[float, int]:
        operations.append(x)
        return frexp(x)

    monkeypatch.setattr(math, "frexp", counted)
    for scale in (1, 4):
        first, second = 4000 * scale, 3900 * scale
        term = tail = 1
        for k in range(1, second + 1):
            term = term * (first + second - k + 1) // k
            tail += term
        operations.clear()
        exact = float(Fraction(2 * tail, 2 ** (first + second)))
        assert mcnemar(first, second) == pytest.approx(exact, rel=1e-12)
        assert len(operations) == second


def generated(right: dict[str, bool]) -> list[dict[str, Any]]:
    """Records of a generation task."""
    return [{"id": id, "exact_match": one, "answer": ""} for id, one in right.items()]


def test_only_questions_that_both_have_answered_count() -> None:
    first = generated({"a": True, "b": False, "c": True, "only first": True})
    second = generated({"c": False, "b": True, "a": True, "only second": False})
    found = compare("generation", None, first, second)["exact_match"]
    assert found.n == 3
    assert (found.first, found.second) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found.difference == 0.0
    assert found.stderr == pytest.approx(math.sqrt(2 / 2 / 3))
    assert found.mcnemar is not None
    assert (found.mcnemar.only_first, found.mcnemar.only_second) == (1, 1)


@pytest.mark.parametrize("type", ["multiple_choice", "cloze"])
def test_the_test_counts_the_answers_that_the_accuracy_counts(type: str) -> None:
    """A question with one choice is always right; a cloze is only if its answer is greedy."""
    records = [
        [
            {"id": "a", "gold": 0, "log_likelihoods": [-1.0], "greedy": [greedy],
             "characters": [1], "bytes": [1], "answer_bytes": 2}
        ]
        for greedy in (False, True)
    ]  # fmt: skip
    found = compare(type, None, *records)["acc"]
    assert found.mcnemar is not None
    assert found.mcnemar.only_second == found.difference == (type == "cloze")


def test_without_common_questions_there_is_no_difference() -> None:
    assert compare("generation", None, generated({"a": True}), generated({"b": True})) == {}


def test_a_difference_of_perplexities_has_the_error_of_the_paired_questions() -> None:
    """A model whose nats are larger by a constant differs by a known factor."""

    def records(shift: float) -> list[dict[str, Any]]:
        return [
            {"id": str(i), "gold": 0, "log_likelihoods": [-nats - shift], "greedy": [False],
             "answer_bytes": 4}
            for i, nats in enumerate([1.0, 2.0, 4.0])
        ]  # fmt: skip

    found = compare("cloze", None, records(0.0), records(0.1))
    perplexity, bits = found["perplexity"], found["bits_per_byte"]
    factor = math.exp(0.1)
    assert perplexity.second == pytest.approx(factor * perplexity.first)
    error = (factor - 1) * perplexity.first * math.sqrt(7 / 3 / 3)
    assert perplexity.stderr == pytest.approx(error)
    assert bits.stderr == pytest.approx(0.0, abs=1e-12)


def test_noise_is_the_relative_standard_deviation() -> None:
    assert noise([0.2, 0.3, 0.4]) == pytest.approx(0.1 / 0.3)
    assert noise([0.2]) is None
    assert noise([]) is None
    assert noise([0.0, 0.0]) is None
