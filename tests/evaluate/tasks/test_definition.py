"""Definitions of tasks: what is accepted, and that nothing malformed runs, connects or explodes."""

from __future__ import annotations

import resource
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.running import ROOT

from dtt.base.errors import ConfigError, DttError, InputError
from dtt.config.base import field_docs
from dtt.config.load import Mistakes
from dtt.evaluate.tasks.definition import Task, load_tasks, shipped_tasks
from dtt.evaluate.tasks.prompt_template import CONVERSIONS

GOOD = """\
type: multiple_choice
data: {hub: org/name, split: test}
prompt: "{question}"
choices: ["{a}", "{b}"]
gold: "{label}"
"""
SHIPPED = sorted(path.stem for path in shipped_tasks().glob("*.yaml") if path.stem != "suites")


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_task_loads_and_names_where_its_examples_come_from(name: str) -> None:
    [task] = load_tasks([name])
    assert task.name == name
    assert task.data.hub is not None
    assert task.type == "rolling" or task.shots.split is not None
    assert (task.chance is None) == (task.type in ("rolling", "generation"))


def test_suites_give_their_tasks_once_with_their_number_of_examples() -> None:
    core = load_tasks(["core", "arc_easy"][:1])
    assert len(core) == len({task.name for task in core}) == 18
    shots = {task.name: task.shots.count for task in core}
    assert shots["hellaswag_zeroshot"] == 0
    assert shots["hellaswag"] == 10
    assert [task.name for task in load_tasks(["quick", "piqa"])][:2] == ["lambada_openai", "piqa"]
    assert len(load_tasks(["quick", "piqa"])) == len(load_tasks(["quick"]))


def test_suites_that_share_tasks_can_be_evaluated_together() -> None:
    def shots(*names: str) -> dict[str, int]:
        return {task.name: task.shots.count for task in load_tasks(names)}

    both = shots("core", "hellaswag", "quick", "hellaswag")
    assert both.items() >= {"hellaswag": 10, "hellaswag_0shot": 0, "piqa": 10}.items()
    assert (both["piqa_0shot"], both["arc_easy_0shot"]) == (0, 0)
    assert set(both) >= set(shots("quick"))


def test_a_file_may_be_a_task_or_a_suite_of_tasks_beside_it(tmp_path: Path) -> None:
    mine = write(tmp_path, GOOD.replace("{hub: org/name, split: test}", "{file: rows.jsonl}"))
    suite = write(tmp_path, "tasks: [piqa, mine.yaml, {task: mine.yaml, name: other}]", "all.yml")
    [task] = load_tasks([mine])
    assert task.data.file == tmp_path / "rows.jsonl"
    tasks = load_tasks([suite])
    assert [task.name for task in tasks] == ["piqa", "mine", "other"]
    assert tasks[1] == task


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two different tasks are named piqa"):
        load_tasks(["piqa", write(tmp_path, GOOD, "piqa.yaml")])


@pytest.mark.parametrize(
    ("name", "near"),
    [("helaswag", "hellaswag"), ("quik", "quick"), ("./arc_esy.yaml", "arc_easy")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises((ConfigError, InputError), match=f"did you mean .*{near}"):
        load_tasks([name])


def test_identity_depends_on_the_prompt_and_not_on_the_place_of_the_rows(tmp_path: Path) -> None:
    def identity(text: str) -> Any:
        return load_tasks([write(tmp_path, text)])[0].identity()

    local = GOOD.replace("{hub: org/name, split: test}", "{file: rows.jsonl}")
    assert identity(GOOD) == identity(local)
    assert identity(GOOD) != identity(GOOD.replace("{question}", "{question} "))
    assert identity(GOOD) != identity(GOOD + "shots: {split: train, separator: x}\n")
    # The result file has the number of examples that were used, which may be another.
    assert identity(GOOD) == identity(GOOD + "shots: {count: 1, split: train}\n")


BAD = {
    "promt: x\nprmpt: y": ["promt: unknown key; did you mean prompt?", "prmpt: unknown key"],
    "choices: 3": ["choices: must be a list of templates"],
    "gold: 1.5": ["gold: must be the index"],
    "gold: 2": ["gold: is not the index of a choice"],
    "prompt: '{{goal}}'\nchoices: ['{a', 'b}']": ["not Jinja", "brace without a partner"],
    "prompt: '{a!eval}{a.__class__()}{}'": ["conversions are", "{a.__class__()} is not a field"],
    "map: {answre: {a: b}}": ["map.answre: is a field that no prompt, choice or answer has"],
    "gold_is: label": ["labels: belongs to gold_is: label"],
    "until: ['x']\nextract: '('": ["until: does not apply", "extract: does not apply",
                                   "extract: is not a regular expression"],
    "replace: [{regex: 'a', to: '\\2'}, {find: a, regex: b}, {}]":
        ["does not fit the regular expression", "takes either find or regex"],
    f"replace: [{{regex: '{'a' * 500}'}}]": ["at most 300 characters"],
    "data: {hub: org, split: test}": ["must be the id of a dataset"],
    "data: {hub: org/name}": ["data.split: is missing"],
    "data: {hub: org/name, split: a, file: b}": ["takes either hub and split, or file"],
    "data: {file: b, split: a}": ["data.split: applies to hub"],
    "shots: {count: 2}": ["name the split or the file"],
    "name: other": ["name: is that of the file"],
    "type: cloze": ["answer: is missing", "choices: does not apply", "gold: does not apply"],
    "chance: .nan": ["mine.yaml"],
}  # fmt: skip
"""Lines that replace those of a good task, and the problems that are reported."""


@pytest.mark.parametrize("lines", BAD)
def test_a_mistake_is_reported_with_its_line_beside_all_others(lines: str, tmp_path: Path) -> None:
    changed = {line.partition(":")[0] for line in lines.splitlines()}
    rest = [line for line in GOOD.splitlines() if line.partition(":")[0] not in changed]
    with pytest.raises(Mistakes, match="in the task") as error:
        load_tasks([write(tmp_path, "\n".join([*rest, lines]))])
    for problem in BAD[lines]:
        assert problem in str(error.value)
    assert f"{tmp_path}/mine.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [x]\nb: [*a, *a]", "a: unknown key"),
        ("type: !!python/object/apply:os.system ['true']", "does not know the tag"),
        ("[" * 5000, "nested too deeply"),
        ("prompt: " + "x" * 70_000, "more than 65,536 bytes"),
        ('prompt: "\\ud800"', "unexpected end of hex escape"),
        ("prompt: \0", "not YAML"),
        ("a: b: c", "not YAML"),
        ("just text", "key: value"),
        ("extends: other.yaml", "cannot extend"),
        ("stop+: [x]", r"stop\+: unknown key"),
        ("<<: {a: 1}", "merge keys"),
        ("", "data: field required"),
        ("a: 1\na.b: 2\ntype: cloze", "a appears twice"),
        ("a: 1\na.b: null\ntype: cloze", "a appears twice"),
        ("{'': null, '.': null}", "data: field required"),
        ("data: null\ndata.hub: 3", r"\n  default  type: field required"),
        ("stages: [{name: a}]\nstages.a.b: 1", "data: field required"),
    ],
)
def test_yaml_that_is_not_a_plain_small_mapping_is_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    start = time.thread_time()
    with pytest.raises((ConfigError, InputError), match=why):
        load_tasks([write(tmp_path, text)])
    assert time.thread_time() - start < 5


def test_a_folder_a_fifo_and_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    subprocess.run(["mkfifo", tmp_path / "fifo.yaml"], check=True)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    for name in ("folder", "fifo", "bytes", "missing"):
        with pytest.raises((ConfigError, InputError)):
            load_tasks([str(tmp_path / f"{name}.yaml")])


# Malformed definitions: a good one with other values, keys and text.
KEYS = [*Task.model_fields, "data.hub", "shots.count", "a.b", "<<", "tasks", "extends", ""]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("{}!._%\\()[]*+?|^$ab:&-#'\"\n", max_size=30),
    st.sampled_from([
        "{{ cycler.__init__.__globals__.os.popen('touch hacked').read() }}", "{a.__class__}",
        "!!python/object/apply:os.system ['touch hacked']", "__import__('os').system('touch x')",
        "http://127.0.0.1:1/x", "(a+)+$", "(?P<", "\\8", "*a", "&a", "\u202e", "\ud800".encode(
            "utf-8", "surrogatepass").decode("latin-1"), "/dev/zero", "../../../etc/passwd",
    ]),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=4),
    ),
    max_leaves=8,
)


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own, in a process that can open no socket and start no process."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a definition opened a socket or started a process")

    monkeypatch.chdir(tmp_path)
    for owner, name in ((socket, "socket"), (socket, "create_connection"), (subprocess, "Popen")):
        monkeypatch.setattr(owner, name, forbidden)
    monkeypatch.setattr("os.system", forbidden)
    return tmp_path


@given(
    changes=st.dictionaries(st.sampled_from(KEYS) | TEXTS, VALUES, max_size=4),
    kept=st.sets(st.sampled_from(["type", "data", "prompt", "choices", "gold"]), min_size=2),
)
@settings(max_examples=150)
def test_malformed_values_raise_errors_of_dtt_and_run_nothing(
    sealed: Path, changes: dict[Any, Any], kept: set[str]
) -> None:
    good = {key: value for key, value in yaml.safe_load(GOOD).items() if key in kept}
    text = yaml.safe_dump(good | changes, allow_unicode=True)
    assert len(task_or_error(sealed, text).encode()) < 20_000


def task_or_error(folder: Path, text: str) -> str:
    """Return the loaded task or dtt's error, after checks of memory and files."""
    path = folder / "task.yaml"
    path.write_text(text)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        answer = str(load_tasks([str(path)]))
    except DttError as error:
        answer = str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 200_000
    assert {entry.name for entry in folder.iterdir()} <= {"task.yaml"}
    return answer


def test_the_pages_show_each_key_of_a_task_and_each_conversion() -> None:
    page = (ROOT / "docs/evaluation.md").read_text()
    assert field_docs(Task).keys() == {*Task.model_fields}  # docs/files.md shows them
    assert [name for name in CONVERSIONS if f"`{name}`" not in page] == []
