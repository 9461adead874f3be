"""Definitions of benchmark tasks: YAML files of plain values, checked before anything is read.

A definition runs no code: prompts are templates of fields, and replacements are strings or regular
expressions. Reading one opens no connection.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from dtt.base.errors import ConfigError, InputError
from dtt.base.patterns import pattern_problem, replacement_problem
from dtt.base.reading import read_small
from dtt.config import explain, load, validation
from dtt.config.base import Section
from dtt.config.layers import Layer, read_file
from dtt.config.merging import nested
from dtt.config.shipped import shipped_configs
from dtt.evaluate.tasks.prompt_template import fields, template_problems

MAX_BYTES = 2**16
"""Maximum size of a definition."""
SUFFIXES = (".yaml", ".yml")
NAME = re.compile(r"[A-Za-z0-9][\w-]*")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")

TaskType = Literal["multiple_choice", "cloze", "schema", "rolling", "generation"]
Template = Annotated[str, Field(max_length=20_000)]

NEEDS: dict[TaskType, tuple[str, ...]] = {
    "multiple_choice": ("prompt", "choices", "gold"),
    "cloze": ("prompt", "answer"),
    "schema": ("choices", "answer", "gold"),
    "rolling": ("answer",),
    "generation": ("prompt", "answer"),
}
"""Keys that a task of each type must set."""
COMMON = {"name", "type", "data", "id", "replace", "strip", "map"}
ALLOWS: dict[TaskType, set[str]] = {
    "multiple_choice": {"labels", "gold_is", "delimiter", "description", "shots", "chance"},
    "cloze": {"delimiter", "description", "shots", "chance"},
    "schema": {"labels", "gold_is", "delimiter", "description", "shots", "chance"},
    "rolling": set(),
    "generation": {
        "delimiter", "description", "shots", "chance", "until", "max_tokens", "extract",
        "extract_last", "ignore", "ignore_case",
    },
}  # fmt: skip
"""Further keys that a task of each type may set, besides COMMON."""


def _checked_choices(value: Any) -> Any:
    """Return the choices of a task: a template, or several."""
    several = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if not several and not isinstance(value, str):
        raise PydanticCustomError("choices", "must be a list of templates, or one of a list field")
    return tuple(value) if several else value


def _checked_gold(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("gold", "must be the index of a choice, or a template")
    return value


class TaskSource(Section):
    """Rows of a task: a split of a dataset on the Hub, or a local file."""

    hub: str | None = None
    """Dataset on the Hugging Face Hub, `org/name`, whose files can be read without its code."""
    name: str | None = None
    """Subset of the Hub dataset."""
    split: str | None = None
    """Split of the Hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of the Hub dataset; null: the newest when it is first downloaded."""
    file: Path | None = None
    """Local file of JSON lines, Parquet or CSV, relative to the folder of the definition."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error unless this is either a Hub split or a file."""
        if (self.hub is None) == (self.file is None):
            yield "", "takes either hub and split, or file"
        elif self.file is not None:
            for key in ("name", "split", "revision"):
                if getattr(self, key) is not None:
                    yield key, "applies to hub, not to file"
        else:
            if not HUB_ID.fullmatch(str(self.hub)):
                yield "hub", f"must be the id of a dataset, org/name (got {self.hub!r})"
            if not self.split:
                yield "split", "is missing: the split of the Hub dataset to read"


class ReplaceRule(Section):
    """A replacement in the rendered texts."""

    find: Annotated[str, Field(min_length=1)] | None = None
    """Literal text to replace."""
    regex: str | None = None
    """Regular expression to replace, in the syntax of the package `regex`."""
    to: str = ""
    """Replacement; for `regex` it may contain groups such as `\\1`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error unless this is a literal or a valid regular expression."""
        if (self.find is None) == (self.regex is None):
            yield "", "takes either find or regex"
        elif self.regex is not None:
            if problem := pattern_problem(self.regex):
                yield "regex", problem
            elif problem := replacement_problem(self.regex, self.to):
                yield "to", problem


class Shots(Section):
    """Few-shot examples, in front of each question."""

    count: NonNegativeInt = 0
    """Number of examples."""
    split: str | None = None
    """Split of the same Hub dataset that the examples come from."""
    file: Path | None = None
    """Local file that the examples come from, relative to the folder of the definition."""
    separator: str = "\n\n"
    """Text after each example."""
    fixed: bool = False
    """Use the same examples for all questions; false: select them for each question, by a hash of
    its id."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if there are two origins of examples."""
        if self.split is not None and self.file is not None:
            yield "", "takes either split or file"


class Task(Section):
    """A benchmark task: where its rows are, and how each becomes a question."""

    name: str = ""
    """Name of the task: that of its file, without the suffix."""
    type: TaskType
    """Form of the questions. `multiple_choice`: choices after a prompt. `cloze`: one answer after a
    prompt. `schema`: one answer after each of several contexts (Winograd). `rolling`: a text.
    `generation`: a prompt that the model continues."""
    data: TaskSource
    """Rows that become questions."""
    prompt: Template = ""
    """Template of the text before the answer."""
    choices: Annotated[str | tuple[str, ...], BeforeValidator(_checked_choices)] = ()
    """Templates of the choices (of the contexts, for `schema`), or one field that holds a list."""
    answer: Template = ""
    """Template of the answer; for `rolling`, of the text. For `generation`, it may be one field
    that holds a list of accepted answers."""
    gold: Annotated[int | str | None, BeforeValidator(_checked_gold)] = None
    """Correct choice: a constant index, or a template that `gold_is` interprets."""
    gold_is: Literal["index", "number", "letter", "choice", "label"] = "index"
    """Meaning of `gold`: an index from 0, a number from 1, a letter from A, the text of a choice,
    or an entry of `labels`."""
    labels: Template | None = None
    """Field that holds the list of labels of the choices, in their order."""
    id: Template | None = None
    """Template of the id of a question; null: a hash of its row."""
    map: dict[str, dict[str, str]] = Field(default={})
    """Fields, and the text that replaces each of their values."""
    strip: bool = False
    """Remove white space around each rendered text, before `replace`."""
    replace: tuple[ReplaceRule, ...] = ()
    """Replacements in each rendered prompt, choice and answer, in this order."""
    delimiter: str = " "
    """Text between the prompt and the answer."""
    description: str = ""
    """Text in front of the examples and the question."""
    shots: Shots = Shots()
    """Few-shot examples."""
    chance: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Accuracy of a random answer, for the centred accuracy."""
    until: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a generated answer, also the text of special tokens."""
    max_tokens: PositiveInt = 256
    """Maximum number of tokens to generate."""
    extract: str | None = None
    """Regular expression that finds the answer in the generated text: its first group, or all. An
    answer without a match is wrong."""
    extract_last: bool = False
    """Take the last match of `extract` instead of the first."""
    ignore: tuple[str, ...] = ()
    """Regular expressions that are removed from both answers before they are compared."""
    ignore_case: bool = False
    """Compare answers without regard to case."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each key that does not fit the type, and for each bad template."""
        needed = NEEDS[self.type]
        for key in needed:
            if getattr(self, key) in ("", (), None):
                yield key, f"is missing: a task of type {self.type} needs it"
        for key in sorted(self.model_fields_set - COMMON - ALLOWS[self.type] - {*needed}):
            yield key, f"does not apply to type {self.type}"
        choices = (self.choices,) if isinstance(self.choices, str) else self.choices
        templates = [(key, getattr(self, key)) for key in ("prompt", "answer", "gold", "labels")]
        templates += [*(("choices", one) for one in choices), ("id", self.id)]
        used = set[str]()
        for key, template in templates:
            if isinstance(template, str):
                yield from ((key, problem) for problem in template_problems(template))
                used |= fields(template) if key != "id" else set()
        for path in sorted(self.map.keys() - used):
            yield f"map.{path}", "is a field that no prompt, choice or answer has"
        if (self.gold_is == "label") != (self.labels is not None):
            yield "labels", "belongs to gold_is: label, and is needed there"
        count = len(self.choices)
        listed = not isinstance(self.choices, str)  # otherwise, each row has its own number
        if listed and isinstance(self.gold, int) and not 0 <= self.gold < max(count, 1):
            yield "gold", f"is not the index of a choice, 0 to {count - 1}"
        extract = () if self.extract is None else (self.extract,)
        for key, patterns in (("extract", extract), ("ignore", self.ignore)):
            yield from ((key, why) for why in map(pattern_problem, patterns) if why)
        if self.shots.split is not None and self.data.hub is None:
            yield "shots.split", "is a split of a Hub dataset, but data is a file: use shots.file"
        if self.shots.count and self.shots.split is None and self.shots.file is None:
            yield "shots", "name the split or the file that the examples come from"

    def identity(self) -> dict[str, Any]:
        """Return what decides the questions of given rows and of a given number of examples."""
        content = self.model_dump(mode="json", exclude={"data", "shots"})
        place = {"split", "file", "count"}
        return content | {"shots": self.shots.model_dump(mode="json", exclude=place)}


def load_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks of names of shipped tasks or suites, and of YAML files, in that order.

    A task that is named twice is returned once; with another number of examples, as in another
    suite, it is a task of its own, such as `piqa_10shot`. Raises ConfigError for an unknown name
    and for an invalid definition; it lists all problems of a file, with their lines.
    """
    found: dict[str, Task] = {}
    for name in names:
        for task in _tasks_of(name):
            known = found.get(task.name, task)
            if task != known == _with_shots(task, known.shots.count):
                changed = {"name": f"{task.name}_{task.shots.count}shot"}
                task = task.model_copy(update=changed)
            if found.setdefault(task.name, task) != task:
                raise ConfigError(
                    f"two different tasks are named {task.name}",
                    why="their results would have the same name",
                    next="rename one of the files, or evaluate them one after the other",
                )
    return list(found.values())


def shipped_tasks() -> Path:
    """Return the folder of the definitions that are shipped with dtt."""
    return shipped_configs() / "tasks"


def _tasks_of(name: str) -> Iterator[Task]:
    path, folder = Path(name), shipped_tasks()
    if path.suffix in SUFFIXES:
        if not path.exists():
            raise InputError(f"no task file {name!r}", where=path.absolute(), next=_known(name))
        layer = _read(path)
        if ("tasks",) in layer:
            yield from _suite(layer[("tasks",)].value, layer[("tasks",)].origin, path.parent)
        else:
            yield _task(layer, path)
        return
    suites = _read(folder / "suites.yaml")
    if (name,) in suites:
        yield from _suite(suites[(name,)].value, suites[(name,)].origin, folder)
    elif NAME.fullmatch(name) and (folder / f"{name}.yaml").is_file() and name != "suites":
        yield _task(_read(folder / f"{name}.yaml"), folder / f"{name}.yaml")
    else:
        raise ConfigError(f"no task or suite {name!r}", next=_known(name))


def _known(name: str) -> str:
    """Return the nearest names of shipped tasks and suites, or all of them."""
    suites = [key[0] for key in _read(shipped_tasks() / "suites.yaml")]
    known = sorted({*suites, *(path.stem for path in shipped_tasks().glob("*.yaml"))} - {"suites"})
    close = difflib.get_close_matches(Path(name).stem, known, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"name a YAML file, or one of {', '.join(known)}"


class SuiteEntry(Section):
    """A task of a suite, with other values of some keys."""

    task: str
    """Name of a shipped task, or a YAML file relative to that of the suite."""
    name: str | None = None
    """Another name of the task in this suite."""
    shots: NonNegativeInt | None = None
    """Number of examples."""


def _suite(value: Any, origin: str, folder: Path) -> Iterator[Task]:
    """Yield the tasks of a suite, a list of names or of mappings like SuiteEntry."""
    if not isinstance(value, list) or not value:
        raise ConfigError("a suite is a list of tasks", where=origin, next="tasks: [hellaswag]")
    for given in value:
        values = given if isinstance(given, Mapping) else {"task": given}
        entry, problems = validation.validate(SuiteEntry, values)
        if entry is None:
            key, why = problems[0]
            raise ConfigError(
                "an entry of a suite is not valid",
                where=origin,
                why=f"{'.'.join(key)}: {why}".removeprefix(": "),
                next="for example - {task: hellaswag, shots: 10}",
            )
        beside = folder / entry.task
        path = beside if beside.suffix in SUFFIXES else shipped_tasks() / f"{entry.task}.yaml"
        if not path.is_file() or path.stem == "suites":
            raise ConfigError(f"no task {entry.task!r}", where=origin, next=_known(entry.task))
        task = _task(_read(path), path)
        name = entry.name or task.name
        _check_name(name, origin)
        count = task.shots.count if entry.shots is None else entry.shots
        yield _with_shots(task, count).model_copy(update={"name": name})


def _with_shots(task: Task, count: int) -> Task:
    shots = task.shots.model_copy(update={"count": count})
    return task.model_copy(update={"shots": shots})


def _task(layer: Layer, path: Path) -> Task:
    """Return the task of a definition; paths in it are relative to the folder of `path`."""
    _check_name(path.stem, str(path))
    task, problems = validation.validate(Task, nested(layer))
    if ("name",) in layer:
        problems.append((("name",), "is that of the file; rename the file instead"))
    if task is None or problems:
        raise load.Mistakes(
            problems, layer, f"the task {path}", next="docs/files.md shows each key"
        )
    changed: dict[str, Any] = {"name": path.stem}
    for key in ("data", "shots"):
        section = getattr(task, key)
        if section.file is not None:
            changed[key] = section.model_copy(update={"file": path.parent / section.file})
    return task.model_copy(update=changed)


def _check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a task",
            where=where,
            why="result files carry it: letters, digits, _ and -",
        )


def _read(path: Path) -> Layer:
    """Return the values of a YAML file with their lines.

    Raises ConfigError for YAML that is large, deep, or has tags.
    """
    # `gold: 1.5` is no template but an index gone wrong, so `gold` does not count as text.
    types = explain.key_types(Task)
    texts = {key: kinds for key, kinds in types.texts.items() if int not in kinds}
    try:
        read_small(path, MAX_BYTES).decode()
        layer = read_file(path, replace(types, texts=texts))
    except OSError as error:
        raise InputError(f"cannot read {path}", why=error.strerror) from None
    except ValueError as error:  # text that is not UTF-8, or a lone surrogate
        raise ConfigError(f"cannot read {path}", why=str(error)) from None
    if ("extends",) in layer:
        raise ConfigError(f"{path}: a task cannot extend a file")
    return layer
