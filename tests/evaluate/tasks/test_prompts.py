"""Questions of rows: templates, conversions and gold answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtt.evaluate.tasks.definition import Task
from dtt.evaluate.tasks.prompt_template import CONVERSIONS, render, render_list
from dtt.evaluate.tasks.prompts import example_of, question_id, question_of

ROW = {"a": " The End", "n": 3, "x": 0.5, "t": True, "o": {"b": ["u", "v"]}, "two words": "w"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}|{n}|{x}|{t}", " The End|3|0.5|True"),
        ("{o.b.1}{two words}", "vw"),
        ("{a!strip!uncapitalize!chop}", "the En"),
        ("{a!last_word}:{a!without_last_word}", "End: The"),
        ("no field", "no field"),
        ("", ""),
    ],
)
def test_a_template_is_text_with_fields(template: str, text: str) -> None:
    assert render(template, ROW) == text


def test_values_of_fields_are_never_templates_themselves() -> None:
    assert render("{a}{b}", {"a": "{b}", "b": "{a!x} {{c}}"}) == "{b}{a!x} {{c}}"


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("text", ["", " ", "_", "a", "é_ B"])
def test_conversions_accept_any_text(name: str, text: str) -> None:
    assert isinstance(render(f"{{v!{name}}}", {"v": text}), str)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{b}", "there is no field 'b'; fields: a, n, x, t, o, two words"),
        ("{o.b.2}", "there is no field 'o.b.2'"),
        ("{a.b}", "there is no field 'a.b'"),
        ("{o}", "is an object, not text"),
        ("{o.b}", "is a list, not text"),
    ],
)
def test_a_field_that_is_missing_or_no_text_is_reported(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render(template, ROW)


def test_choices_are_templates_or_the_entries_of_a_list() -> None:
    assert render_list("{o.b}", ROW) == ["u", "v"]
    assert render_list(("{n}", "{o.b.0}"), ROW) == ["3", "u"]
    assert render_list("{a!strip}", ROW) == ["The End"]
    assert render_list("{o.b!upper}", ROW) == ["U", "V"]
    assert render_list("{o.b!upper}", ROW, {"o.b": {"u": "x", "v": "y"}}) == ["X", "Y"]
    with pytest.raises(ValueError, match="'v', which is not in map: u"):
        render_list("{o.b}", ROW, {"o.b": {"u": "x"}})


def made(**changes: Any) -> Task:
    values = {
        "type": "multiple_choice",
        "data": {"file": Path("rows.jsonl")},
        "prompt": "{q}",
        "choices": ("{x}", "{y}"),
        "gold": "{g}",
    }
    return Task.model_validate(values | changes)


@pytest.mark.parametrize(
    ("gold_is", "value", "more", "expected"),
    [
        ("index", 1, {}, 1),
        ("index", "1", {}, 1),
        ("index", True, {}, 1),
        ("number", "2", {}, 1),
        ("letter", "B", {}, 1),
        ("letter", "a", {}, 0),
        ("choice", "no", {}, 1),
        ("label", "2", {"labels": "{l}"}, 1),
        ("label", "B", {"labels": "{m!strip!upper}"}, 1),
    ],
)
def test_the_gold_answer_is_what_the_task_says(
    gold_is: str, value: Any, more: dict[str, str], expected: int
) -> None:
    task = made(gold_is=gold_is, **more)
    row = {"q": "?", "x": "yes", "y": "no", "g": value, "l": [1, 2], "m": ["a", " b"]}
    assert question_of(task, row, "id", "").gold == expected


@pytest.mark.parametrize(
    ("gold_is", "value"),
    [("index", 2), ("number", 0), ("letter", "C"), ("letter", ""), ("choice", "maybe"),
     ("index", "²"), ("index", 10**30)],
)  # fmt: skip
def test_a_gold_answer_that_is_no_choice_is_refused(gold_is: str, value: Any) -> None:
    row = {"q": "?", "x": "yes", "y": "no", "g": value}
    with pytest.raises(ValueError, match="gold is"):
        question_of(made(gold_is=gold_is), row, "id", "")
    with pytest.raises(ValueError, match="1 labels for 2 choices"):
        question_of(made(gold_is="label", labels="{l}"), row | {"l": ["A"]}, "id", "")


def test_a_constant_gold_answer_is_one_of_the_choices_of_each_row() -> None:
    task = made(choices="{c}", gold=3)
    row = {"q": "?", "c": ["a", "b", "c", "d"]}
    assert question_of(task, row, "id", "").gold == 3
    with pytest.raises(ValueError, match="gold is choice 3"):
        question_of(task, row | {"c": ["a", "b"]}, "id", "")


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="an answer is empty"):
        question_of(made(delimiter=""), {"q": "?", "x": "", "y": "no", "g": 1}, "id", "")


def test_description_and_examples_are_in_front_of_each_question() -> None:
    task = made(description="Answer.\n\n", shots={"count": 1, "file": Path("x"), "separator": "\n"})
    row = {"q": "?", "x": "yes", "y": "no", "g": 1}
    example = example_of(task, row)
    assert example == "? no\n"
    assert question_of(task, row, "id", example).contexts == ("Answer.\n\n? no\n?",)


def test_the_id_is_a_hash_of_the_row_or_a_template() -> None:
    row = {"q": "?", "n": 7}
    assert question_id(made(), row) == question_id(made(), {"n": 7, "q": "?"})
    assert question_id(made(), row) != question_id(made(), row | {"n": 8})
    assert question_id(made(id="q-{n}"), row) == "q-7"
