"""`dtt eval compare` chooses the results that the options name, and else the most complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.local_tasks import write_tasks
from support.running import Dtt
from support.tiny_job import write_checkpoint, write_job


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
    (newer / "failures.jsonl").write_text(json.dumps({"time": 1, "reason": "no memory"}) + "\n")
    [sealed] = (job / "evals/step-000010").glob("pages-*.jsonl")
    (newer / sealed.name).write_bytes(sealed.read_bytes()[:-10])
    for task in ("sums", "pages"):
        done = dtt("eval", "compare", "jobs/tiny", "jobs/tiny", "--tasks", f"{task}.yaml", "--json")
        assert [json.loads(line)["task"] for line in done.stdout.splitlines()] == [task]


@pytest.mark.parametrize(
    "option", [["--step", "5"], ["--harness", "mmlu"], ["eval.batch_tokens=9"]]
)
def test_options_of_an_evaluation_are_refused(dtt: Dtt, option: list[str]) -> None:
    done = dtt("eval", "compare", "a", "b", *option, expect=2)
    assert f"dtt eval compare does not take {option[0].partition('=')[0]}" in done.stderr
