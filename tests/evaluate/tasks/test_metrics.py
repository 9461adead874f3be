"""Metrics equal their definitions, and their standard errors are those of the sampling noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dtt.evaluate.tasks.metrics import (
    AnswerRecord,
    compare,
    count_words,
    estimates,
    has_tie,
    mean_stderr,
    noise,
    task_result,
)

SIMULATIONS, QUESTIONS = 2000, 200
Draw = Callable[[np.random.Generator], list[AnswerRecord]]


def asked(id: int, scores: list[float], gold: int, choices: list[str]) -> AnswerRecord:
    """The record of a question with several choices."""
    return {
        "id": str(id),
        "gold": gold,
        "log_likelihoods": scores,
        "greedy": [False] * len(scores),
        "characters": [len(choice) for choice in choices],
        "bytes": [len(choice.encode()) for choice in choices],
        "answer_bytes": len(f" {choices[gold]}".encode()),
        "tie": has_tie(scores),
        "truncated": False,
        "separate": False,
    }


QUESTION = asked(0, [-8.0, -9.0, -4.5], 1, ["ääää", "abcdefghi", "ab"])


EMPTY_CHOICE = asked(0, [-0.5, -9.0], 1, ["", "long"])


@pytest.mark.parametrize(
    ("question", "metric", "value"),
    [
        # Per character -2, -1, -2.25; per byte -1, -1, -2.25: the first of equals is chosen.
        (QUESTION, "acc", 0.0),
        (QUESTION, "acc_norm", 1.0),
        (QUESTION, "acc_bytes", 0.0),
        (EMPTY_CHOICE, "acc_norm", 1.0),  # an empty choice is never chosen per character
        (QUESTION, "bits_per_byte", 9.0 / math.log(2) / 10),  # with the leading space
    ],
)
def test_metrics_of_options_are_those_of_lm_eval(
    question: AnswerRecord, metric: str, value: float
) -> None:
    found = estimates("multiple_choice", None, [question])[metric]
    assert found.value == pytest.approx(value)


def test_equal_options_are_counted_as_ties() -> None:
    tied = asked(1, [-3.0, -2.0, -2.0], 1, ["a", "b", "c"])
    result = task_result("t", "multiple_choice", None, [QUESTION, tied])
    assert (result.n, result.ties) == (2, 1)
    assert result.scores["acc"].value == 0.5


def test_centred_accuracy_is_0_at_chance_and_1_if_all_is_right() -> None:
    right, wrong = asked(1, [-1.0, -2.0], 0, ["a", "b"]), asked(2, [-1.0, -2.0], 1, ["a", "b"])
    for records, centred in (([right, wrong], 0.0), ([right, right], 1.0), ([wrong] * 2, -1.0)):
        assert estimates("multiple_choice", 0.5, records)["centred"].value == centred
    assert "centred" not in estimates("multiple_choice", None, [right])


def cloze(nats: float, *, greedy: bool, size: int = 4) -> AnswerRecord:
    """The record of a cloze question."""
    return {"gold": 0, "log_likelihoods": [-nats], "greedy": [greedy], "answer_bytes": size}


def test_perplexity_of_a_cloze_task_is_that_of_complete_answers() -> None:
    records = [cloze(1.0, greedy=True), cloze(3.0, greedy=False)]
    found = estimates("cloze", None, records)
    assert found["perplexity"].value == pytest.approx(math.exp(2.0))
    assert found["acc"].value == 0.5


def document(nats: float, size: int, words: int) -> AnswerRecord:
    """The record of a document."""
    return {"log_likelihood": -nats, "bytes": size, "words": words}


def test_rolling_metrics_are_totals_over_all_documents() -> None:
    records = [document(10.0, 20, 4), document(60.0, 50, 16)]
    values = {name: each.value for name, each in estimates("rolling", None, records).items()}
    assert values == {
        "bits_per_byte": pytest.approx(1 / math.log(2)),
        "byte_perplexity": pytest.approx(math.e),
        "word_perplexity": pytest.approx(math.exp(3.5)),
    }


def test_documents_without_text_have_no_metrics() -> None:
    assert estimates("rolling", None, [document(0.0, 0, 1)] * 2) == {}
    assert "bits_per_byte" in estimates("rolling", None, [document(0.0, 0, 1), document(1, 2, 1)])


def test_a_perplexity_that_no_float_holds_is_left_out() -> None:
    assert "word_perplexity" not in estimates("rolling", None, [document(1e4, 900, 2)])


def test_words_are_counted_as_lm_eval_counts_them() -> None:
    assert [count_words(text) for text in ("", "a b", " a  b\nc ", "a\u00a0b")] == [1, 2, 5, 2]


def test_the_error_of_a_mean_is_the_sample_deviation_over_the_root_of_n() -> None:
    values = [0.0, 1.0, 1.0, 4.0]
    assert mean_stderr(values) == pytest.approx(statistics.stdev(values) / 2)
    assert mean_stderr([1.0]) is None


def choices(random: np.random.Generator) -> list[AnswerRecord]:
    """A sample of questions, of which the model knows 70 %."""
    right = random.random(QUESTIONS) < 0.7
    nats = random.gamma(2.0, 1.5, QUESTIONS)
    return [
        asked(i, [-n, -n - 1.0 if known else -n + 0.5], 0, ["abcd", "efgh"])
        for i, (known, n) in enumerate(zip(right, nats.tolist(), strict=True))
    ]


def answers(random: np.random.Generator) -> list[AnswerRecord]:
    """A sample of cloze questions with a skewed distribution of nats."""
    return [cloze(nats, greedy=nats < 1) for nats in random.gamma(2.0, 0.5, QUESTIONS).tolist()]


def documents(random: np.random.Generator) -> list[AnswerRecord]:
    """A sample of documents of very different lengths, in each of which the loss differs."""
    words = random.geometric(0.01, QUESTIONS)
    losses = random.gamma(20.0, 0.2, QUESTIONS)
    return [document(w * x, 5 * w, w) for w, x in zip(words.tolist(), losses.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("type_", "draw"), [("schema", choices), ("cloze", answers), ("rolling", documents)]
)
def test_standard_errors_are_those_of_the_bootstrap(type_: str, draw: Draw) -> None:
    random = np.random.default_rng(3)
    records = draw(random)
    resampled = [
        estimates(type_, 0.5, [records[i] for i in chosen])
        for chosen in random.integers(0, QUESTIONS, (SIMULATIONS, QUESTIONS))
    ]
    for name, found in estimates(type_, 0.5, records).items():
        values = [one[name].value for one in resampled]
        assert found.score.stderr == pytest.approx(statistics.stdev(values), rel=0.1), name


def test_paired_95_percent_intervals_contain_the_truth_in_93_to_97_percent_of_samples() -> None:
    """Both models find the same questions hard; the second one is right 5 % more often."""
    random = np.random.default_rng(7)
    hits = narrower = 0
    for _ in range(SIMULATIONS):
        hardness = random.random(QUESTIONS)
        pair = [
            generated({str(i): right for i, right in enumerate(answered.tolist())})
            for answered in (
                hardness + random.normal(0, 0.1, QUESTIONS) < skill for skill in (0.6, 0.65)
            )
        ]
        found = compare("generation", None, *pair)["exact_match"]
        assert found.interval is not None
        assert found.stderr is not None
        hits += found.interval[0] <= 0.05 <= found.interval[1]
        alone = [estimates("generation", None, one)["exact_match"].score.stderr for one in pair]
        narrower += found.stderr < math.hypot(*(error or 0.0 for error in alone))
    assert 0.93 <= hits / SIMULATIONS <= 0.97
    assert narrower == SIMULATIONS


# ---- paired comparisons --------------------------------------------------------------------------


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
