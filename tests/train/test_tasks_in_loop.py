"""Benchmark tasks in the training loop: recorded when due, again after a stop, without a trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.records import assert_same_tensors, records
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.track import jsonl
from dtt.train.run import is_done

Settings = Callable[..., list[str]]
QUESTIONS = 24


def write_tasks(folder: Path) -> str:
    """Write a task with choices and a generated one; return the value of `eval.tasks`."""
    words = ["one", "two", "three", "four", "five", "six"]
    rows = [
        {"text": f"{words[i % 6]} {words[i * i % 6]}", "a": words[(i + 1) % 6], "b": "seven eight"}
        for i in range(QUESTIONS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(
        "type: multiple_choice\ndata: {file: rows.jsonl}\nprompt: '{text}'\n"
        "choices: ['{a}', '{b}']\ngold: 0\nchance: 0.5\n"
    )
    (folder / "answers.yaml").write_text(
        "type: generation\ndata: {file: rows.jsonl}\nprompt: '{text}'\nanswer: '{a}'\n"
        "max_tokens: 3\nuntil: [' ']\n"
    )
    return f"[{folder / 'words.yaml'}, {folder / 'answers.yaml'}]"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def evaluated(tiny: Settings, tasks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 12 steps that is evaluated every 5 steps."""
    folder = tmp_path_factory.mktemp("evaluated")
    changes = {"eval__tasks": tasks, "eval__every": 5, "model__dropout": 0.1}
    done = Dtt(folder)("train", *tiny(**changes))
    assert "step 12: words acc " in done.stderr
    return folder / "jobs/t"


def test_tasks_are_recorded_when_they_are_due(evaluated: Path) -> None:
    found = records(evaluated, "task")
    steps = [0, 5, 10, 12]
    assert [(r["step"], r["task"]) for r in found] == [
        (step, task) for step in steps for task in ("words", "answers")
    ]
    assert all(r["n"] == QUESTIONS for r in found)
    words = [r for r in found if r["task"] == "words"]
    assert all(0 <= r["acc"] <= 1 and 0 <= r["acc_stderr"] < 0.2 for r in words)
    assert words[-1]["bits_per_byte"] < words[0]["bits_per_byte"]
    assert not (evaluated / "evals").exists()


def test_evaluation_changes_no_bit_of_the_training(
    evaluated: Path, tiny: Settings, tmp_path: Path
) -> None:
    """Also of the generators, as the run has dropout."""
    Dtt(tmp_path)("train", *tiny(model__dropout=0.1))
    plain = tmp_path / "jobs/t"
    assert_same_tensors(plain, evaluated, 12)
    kinds = ("train", "eval", "sample")
    assert records(plain, *kinds) == records(evaluated, *kinds)


@pytest.mark.slow
def test_a_finished_job_is_evaluated_on_tasks_that_are_added(
    tiny: Settings, tasks: str, evaluated: Path, tmp_path: Path
) -> None:
    dtt = Dtt(tmp_path)
    dtt("train", *tiny(model__dropout=0.1))
    job, metrics = tmp_path / "jobs/t", tmp_path / "jobs/t/metrics.jsonl"
    before = records(job)
    dtt("train", "jobs/t", f"eval.tasks={tasks}")
    expected = [r for r in records(evaluated, "task") if r["step"] == 12]
    assert records(job, "task") == expected
    assert [r for r in records(job) if r["kind"] != "task"] == before
    again = dtt("train", "jobs/t")
    assert "is done" in again.stderr
    assert records(job, "task") == expected

    lines = metrics.read_text().splitlines(keepends=True)
    [*_, last] = (n for n, line in enumerate(lines) if '"kind": "task"' in line)
    metrics.write_text("".join(lines[:last] + lines[last + 1 :]))  # as after a kill in between
    dtt("train", "jobs/t")
    assert records(job, "task") == expected


def test_a_job_whose_last_evaluation_gave_no_scores_is_done(
    evaluated: Path, tmp_path: Path
) -> None:
    """As after a divergence: it would be evaluated again at every start."""
    job = JobDir(shutil.copytree(evaluated, tmp_path / "t"))
    records = list(jsonl.read(job.metrics, "task"))
    lines = job.metrics.read_text().splitlines(keepends=True)
    lines = [line for line in lines if '"kind": "task"' not in line]
    newest = store.newest(job.checkpoints)
    job.metrics.write_text("".join(lines))
    assert newest is not None
    plan: Any = SimpleNamespace(steps=12)
    next_attempt = SimpleNamespace(number=job.attempt() + 1)
    run: Any = SimpleNamespace(cfg=load_job(job.root), job=job, plan=plan, attempt=next_attempt)
    assert not is_done(run, newest)
    none = {"kind": "task", "step": 12, "n": 0}
    lines += [json.dumps(none | {"task": name}) + "\n" for name in {r["task"] for r in records}]
    job.metrics.write_text("".join(lines))
    assert is_done(run, newest)


def test_a_task_that_is_missing_ends_the_run_before_it_starts(dtt: Dtt, tiny: Settings) -> None:
    done = dtt("train", *tiny(eval__tasks="[hellaswagg]"), expect=2)
    assert "hellaswag" in done.stderr
    assert not (dtt.folder / "jobs").exists()


def test_questions_are_fetched_with_the_documents_or_without(dtt: Dtt, tasks: str) -> None:
    """For nodes without a network. Here the questions are local, and only read."""
    both = dtt("download", "-d", "python-stdlib", f"eval.tasks={tasks}").stdout
    assert f"tasks   2 with {2 * QUESTIONS} questions, in data/eval" in both
    assert "corpus  data/corpus/python-stdlib" in both
    assert "corpus" not in dtt("download", f"eval.tasks={tasks}").stdout
    dtt("download", "eval.tasks=[missing.yaml]", expect=66)
