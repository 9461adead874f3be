"""`dtt eval compare` chooses the results that the options name, and else the most complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.local_tasks import write_tasks
from support.running import Dtt
from support.tiny_job import write_checkpoint, write_job

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, InputError
from dtt.config.evaluation import EvalConfig
from dtt.evaluate import compare
from dtt.evaluate.models import folder_model
from dtt.evaluate.tasks.metrics import task_result
from dtt.evaluate.tasks.result_files import SCORING_VERSION, ResultFile, weights_of
from dtt.report import task_results


def test_options_choose_the_results_and_else_complete_ones_without_averages(
    dtt: Dtt, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    job = write_job(tmp_path, seq_len=128)
    for step in (15, 20):
        write_checkpoint(job, step, average_says={1: 2})
        for options in ([], ["eval.limit=7"], ["--ema"], ["eval.shots=1"]):
            dtt("eval", f"jobs/tiny@{step}", "--tasks", "sums.yaml", *options)
    pair = "jobs/tiny@15", "jobs/tiny@20"
    for options, described in (
        ([], "{}"),
        (["eval.limit=7"], "{} (eval.limit=7)"),
        (["--ema"], "{} (--ema)"),
        (["eval.shots=1"], "{} (eval.shots=1)"),
    ):
        shots = ["eval.shots=0"] if options != ["eval.shots=1"] else []
        shown = dtt("eval", "compare", *pair, *options, *shots).stdout
        n = 7 if options == ["eval.limit=7"] else 30
        one, other = map(described.format, pair)
        assert f"sums: {other} minus {one}, {n} questions\n" in shown
    done = dtt("eval", "compare", *pair, "eval.limit=8", expect=66)
    assert "no results to compare" in done.stderr


def test_a_step_without_complete_results_of_the_tasks_is_passed_over(
    dtt: Dtt, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    job = write_job(tmp_path, seq_len=128)
    dtt("eval", "jobs/tiny@5", "--tasks", "sums.yaml")
    dtt("eval", "jobs/tiny@10", "--tasks", "pages.yaml")
    newer = job / "evals/step-000015"
    newer.mkdir()
    [sealed] = (job / "evals/step-000010").glob("pages-*.jsonl")
    (newer / sealed.name).write_bytes(sealed.read_bytes()[:-10])
    for task in ("sums", "pages"):
        done = dtt("eval", "compare", "jobs/tiny", "jobs/tiny", "--tasks", f"{task}.yaml", "--json")
        assert [json.loads(line)["task"] for line in done.stdout.splitlines()] == [task]


def seal(folder: Path, weights: str, right: int, task: str = "sums", **options: Any) -> Path:
    """Write the result of a model that answers `right` of four questions."""
    header = {
        "type": "generation",
        "chance": None,
        "task": task,
        "task_sha256": "t",
        "bos": "tokenizer",
    }
    header |= {"data_sha256": "d", "shots": 0, "limit": None, "chat": None, "weights": weights}
    header |= {"ema": False, "precision": "fp32", "scoring": SCORING_VERSION, **options}
    file = ResultFile.of(folder, header)
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"id": str(i), "answer": "", "exact_match": i < right} for i in range(4)]
    with file.writing() as writer:
        writer.append(records)
        writer.seal(task_result(task, "generation", None, records))
    return file.path


def compared(capsys: pytest.CaptureFixture[str], one: str, other: str) -> dict[str, list[float]]:
    compare.run(one, other, as_json=True)
    found = {}
    for each in map(json.loads, capsys.readouterr().out.splitlines()):
        metric = each["metrics"]["exact_match"]
        low, high = metric["interval"]
        assert (low + high) / 2 == pytest.approx(metric["difference"])
        found[each["task"]] = [metric["first"], metric["second"]]
    return found


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two models in folders of the same name, and the hashes of their weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text("{}")
        (tmp_path / name / "model" / "model.safetensors").write_text(name)
    return {name: folder_model("", tmp_path / name / "model").identity() for name in ("a", "b")}


def test_results_are_those_of_the_weights_and_not_of_a_folder_of_the_same_name(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    evals = Path("evals/model")
    seal(evals, models["a"], 1)
    with pytest.raises(InputError, match="b/model has no results to compare"):
        compare.run("a/model", "b/model")
    seal(evals, models["b"], 3)
    assert compared(capsys, "a/model", "hf:b/model") == {"sums": [0.25, 0.75]}
    with pytest.raises(ConfigError, match="does not say which model is meant"):
        compare.run("a/model", "evals/model")
    Path("a/model/model.safetensors").write_text("trained on")
    with pytest.raises(InputError, match="a/model has no results to compare"):
        compare.run("a/model", "b/model")


@pytest.mark.parametrize(
    "other",
    [
        {"scoring": 1}, {"limit": 2}, {"bos": "never"}, {"chat": "c"}, {"shots": 5},
        {"data_sha256": "x"}, {"task_sha256": "x"},
    ],
)  # fmt: skip
def test_what_was_asked_or_scored_otherwise_is_left_out_by_name(
    other: dict[str, Any],
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    [name] = other
    seal(Path("evals/model"), models["a"], 1)
    seal(Path("evals/model"), models["b"], 2, **other)
    with pytest.raises(ConfigError, match=f"{name} differs"):
        compare.run("a/model", "b/model")
    for weights in models.values():
        seal(Path("evals/model"), weights, 2, task="words")
    assert compared(capsys, "a/model", "b/model") == {"words": [0.5, 0.5]}
    assert "left out: " in caplog.text
    assert f"{name} differs" in caplog.text


def test_a_step_has_the_results_of_its_checkpoint_and_else_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = JobDir(write_job(tmp_path))
    weights = weights_of(job.checkpoints / "step-000010")
    for folder, ours in (("step-000010", weights), ("step-000009", "deleted")):
        paths = [seal(job.evals / folder, hash, n) for hash, n in ((ours, 1), ("z", 2), ("0", 3))]
        for time, path in zip((30, 10, 20), paths, strict=True):
            os.utime(path, (time, time))
    seal(job.evals / "step-000005", "of other weights", 4)
    found = compared(capsys, "jobs/tiny@10", "jobs/tiny@9")
    assert found == {"sums": [0.25, 0.25]}
    with pytest.raises(InputError, match="has no results to compare"):
        compare.run("jobs/tiny@5", "jobs/tiny@10")
    limited = seal(job.evals / "step-000010", weights, 4, limit=2)
    os.utime(limited, (1, 1))
    curves = {one["task"]: one for one in task_results.of_job(job, [])}
    assert curves["sums"]["values"] == (0.25, 0.25)
    assert curves["sums, limit 2"]["values"] == (1.0,)
    measured = {"kind": "task", "task": "sums", "step": 10, "exact_match": 0.9}
    curves = {one["task"]: one for one in task_results.of_job(job, [measured], EvalConfig(limit=3))}
    assert curves["sums, limit 3"]["values"] == (0.9,)


@pytest.mark.parametrize("option", [["--step", "5"], ["eval.batch_tokens=9"]])
def test_options_of_an_evaluation_are_refused(dtt: Dtt, option: list[str]) -> None:
    done = dtt("eval", "compare", "a", "b", *option, expect=2)
    assert f"dtt eval compare does not take {option[0].partition('=')[0]}" in done.stderr
