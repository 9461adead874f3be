"""Questions: the texts that a task makes of a row, with its few-shot examples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtt.artifacts.manifest import fingerprint
from dtt.base.patterns import replace
from dtt.evaluate.tasks.definition import Task
from dtt.evaluate.tasks.prompt_template import render, render_list

Row = Mapping[str, Any]
MAX_CHOICES = 1000


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of a task as text.

    The number of contexts and continuations depends on the type of the task: one and n for
    `multiple_choice`, one and one for `cloze`, n and one for `schema`, an empty one and one for
    `rolling`, and one and none for `generation`. Continuations begin with the task's delimiter.
    """

    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int
    """Index of the correct option."""
    answers: tuple[str, ...] = ()
    """Accepted answers of a `generation` task; of a `rolling` one, the text before `replace`, whose
    words and bytes are counted, as lm-evaluation-harness does."""


def question_of(task: Task, row: Row, id: str, examples: str) -> Question:
    """Return the question of a row; `examples` is the text in front of it.

    Raises ValueError, without the place of the row, if the row does not fit the task.
    """
    if task.type == "rolling":
        raw = render(task.answer, row, task.map)
        return Question(id, ("",), (_rewritten(task, raw),), 0, (raw,))
    question = _rendered(task, row, id)
    if not all(question.continuations) or not all(answer.strip() for answer in question.answers):
        raise ValueError("an answer is empty")
    contexts = tuple(f"{task.description}{examples}{context}" for context in question.contexts)
    # JSON may have half of a character, "\\ud83d", which no tokenizer takes: a ValueError.
    "".join((*contexts, *question.continuations, *question.answers)).encode()
    return dataclasses.replace(question, contexts=contexts)


def example_of(task: Task, row: Row) -> str:
    """Return a row as a few-shot example, with its answer and the separator."""
    question = _rendered(task, row, "")
    context = question.contexts[question.gold if task.type == "schema" else 0]
    if task.type == "generation":
        answer = f"{task.delimiter}{question.answers[0]}"
    else:
        answer = question.continuations[0 if task.type == "schema" else question.gold]
    return f"{context}{answer}{task.shots.separator}"


def question_id(task: Task, row: Row) -> str:
    """Return the id of a row: that of its template, or a hash of the row."""
    if task.id is not None:
        return render(task.id, row)
    return fingerprint(_plain(row))[:16]


def _rendered(task: Task, row: Row, id: str) -> Question:
    """Return the question of a row, without a description and examples in front of it."""

    def text(template: str) -> str:
        return _rewritten(task, render(template, row, task.map))

    def texts(templates: str | tuple[str, ...]) -> tuple[str, ...]:
        rendered = render_list(templates, row, task.map)
        if not 0 < len(rendered) <= MAX_CHOICES:
            raise ValueError(f"a question has 1 to {MAX_CHOICES} choices, not {len(rendered)}")
        return tuple(_rewritten(task, one) for one in rendered)

    if task.type == "cloze":
        return Question(id, (text(task.prompt),), (task.delimiter + text(task.answer),), 0)
    if task.type == "generation":
        return Question(id, (text(task.prompt),), (), 0, texts(task.answer))
    choices = texts(task.choices)
    gold = _gold(task, row, choices)
    if task.type == "schema":
        return Question(id, choices, (task.delimiter + text(task.answer),), gold)
    return Question(
        id, (text(task.prompt),), tuple(task.delimiter + choice for choice in choices), gold
    )


def _rewritten(task: Task, text: str) -> str:
    if task.strip:
        text = text.strip()
    for rule in task.replace:
        if rule.find is not None:
            text = text.replace(rule.find, rule.to)
        else:
            text = replace(str(rule.regex), rule.to, text)
    return text


def _gold(task: Task, row: Row, choices: Sequence[str]) -> int:
    if isinstance(task.gold, int):
        index = task.gold
    else:
        index = _index(task, row, render(str(task.gold), row, task.map), choices)
    if not 0 <= index < len(choices):
        raise ValueError(f"gold is choice {index}, counted from 0, of {len(choices)}")
    return index


def _index(task: Task, row: Row, gold: str, choices: Sequence[str]) -> int:
    match task.gold_is:
        case "index" | "number":
            if gold in ("True", "False"):
                return int(gold == "True")
            if not re.fullmatch(r"\d{1,6}", gold, re.ASCII):
                raise ValueError(f"gold is {gold!r}, not an index: does this split have answers?")
            return int(gold) - (task.gold_is == "number")
        case "letter":
            if not re.fullmatch(r"[A-Za-z]", gold):
                raise ValueError(f"gold is {gold!r}, not a letter")
            return ord(gold.upper()) - ord("A")
    known = (
        list(choices) if task.gold_is == "choice" else render_list(str(task.labels), row, task.map)
    )
    if len(known) != len(choices):
        raise ValueError(f"there are {len(known)} labels for {len(choices)} choices")
    if gold not in known:
        raise ValueError(f"gold is {gold!r}, which is none of {known[:10]}")
    return known.index(gold)


def _plain(value: Any) -> Any:
    """Return a value of a row as JSON can represent it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)
