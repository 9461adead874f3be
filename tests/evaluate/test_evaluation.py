"""`dtt eval` evaluates every type of task, once, with any number of processes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_runs, tiny_job
from support.forked import CONTEXT
from support.local_tasks import (
    ALL_TASKS,
    DEFINITIONS,
    evaluate_alone,
    evaluate_in_small_blocks,
    write_tasks,
)
from support.ranks import on_ranks
from support.running import Dtt, wait_until
from support.tiny_job import (
    IM_END,
    make_model,
    make_tokenizer,
    write_chat_job,
    write_checkpoint,
    write_job,
)

from dtt.artifacts.manifests import DataManifest
from dtt.evaluate.evaluation import with_keys
from dtt.evaluate.tasks.result_files import read
from dtt.model.decoder import Decoder

Lines = list[dict[str, Any]]
SEED = 18
KILLS = 4


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with checkpoints of steps 5 and 10, next to the files of tasks."""
    write_tasks(tmp_path)
    write_job(tmp_path, seq_len=128)
    return Path("jobs/tiny")


def evaluated(dtt: Dtt, *arguments: object) -> Lines:
    """Run `dtt eval ARGUMENTS --json`; return the objects that it printed."""
    return [json.loads(line) for line in dtt("eval", *arguments, "--json").stdout.splitlines()]


def records(dtt: Dtt, line: dict[str, Any]) -> Lines:
    """The records in the result file of a printed object."""
    return read(dtt.folder / line["file"]).records


def test_each_type_of_task_is_scored(dtt: Dtt, job: Path) -> None:
    lines = evaluated(dtt, job, "--tasks", ALL_TASKS)
    assert [line["task"] for line in lines] == list(DEFINITIONS)
    assert all(line["n"] == 30 and line["step"] == 10 for line in lines)
    metrics = {line["task"]: set(line["scores"]) for line in lines}
    assert metrics == {
        "sums": {"acc", "acc_norm", "acc_bytes", "centred", "bits_per_byte"},
        "words": {"acc", "perplexity", "bits_per_byte"},
        "names": {"acc", "bits_per_byte"},
        "pages": {"bits_per_byte", "byte_perplexity", "word_perplexity"},
        "replies": {"exact_match"},
    }
    sums, _, _, pages, _ = lines
    right = [
        max(r["log_likelihoods"]) == r["log_likelihoods"][r["gold"]] for r in records(dtt, sums)
    ]
    assert sums["scores"]["acc"]["value"] == pytest.approx(sum(right) / 30)
    documents = records(dtt, pages)
    nats = -sum(r["log_likelihood"] for r in documents)
    bits = nats / sum(r["bytes"] for r in documents) / math.log(2)
    assert pages["scores"]["bits_per_byte"]["value"] == pytest.approx(bits)


def test_a_model_that_knows_the_answers_scores_1(dtt: Dtt, tmp_path: Path) -> None:
    """The model says which byte follows which: after a space `b`, then a newline."""
    job = write_job(tmp_path)
    ids = make_tokenizer().encode(" b\n").ids
    write_checkpoint(job, 20, says={ids[0]: ids[1], ids[1]: ids[2]})
    rows = [{"q": f"{i} is", "c": ["a", "b"], "g": 1, "a": "b"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "data: {file: rows.jsonl}\nprompt: '{q}'\n"
    (tmp_path / "two.yaml").write_text(
        f"{common}type: multiple_choice\nchoices: '{{c}}'\ngold: '{{g}}'\n"
    )
    (tmp_path / "say.yaml").write_text(
        f"{common}type: generation\nanswer: '{{a}}'\nuntil: [\"\\n\"]\nmax_tokens: 4\n"
        "replace: [{regex: '(is)$', to: '\\1 '}]\n"
    )
    two, say = evaluated(dtt, job, "--tasks", "two.yaml,say.yaml")
    assert two["scores"]["acc"]["value"] == 1.0
    assert [record["answer"] for record in records(dtt, say)] == ["b"] * 4
    assert say["scores"]["exact_match"]["value"] == 1.0


def test_what_was_evaluated_is_not_evaluated_again(dtt: Dtt, job: Path) -> None:
    first = evaluated(dtt, job, "--tasks", "sums.yaml,pages.yaml")
    for file in (dtt.folder / job / "checkpoints/step-000010").glob("model-*"):
        file.unlink()  # the weights are not needed
    again = evaluated(dtt, job, "--tasks", "sums.yaml,pages.yaml")
    assert again == first


def test_a_result_belongs_to_its_model_its_task_and_its_options(dtt: Dtt, job: Path) -> None:
    """Changing any of them changes the file; the same ones lead to the same file."""

    def file(*options: object, source: object = f"{job}@10") -> str:
        [line] = evaluated(dtt, source, "--tasks", "sums.yaml", *options)
        return str(Path(line["file"]).name)

    names = [
        file(),
        file(source=f"{job}@5"),
        file("eval.shots=2"),
        file("eval.limit=7"),
        file("eval.bos=always"),
    ]
    rows = dtt.folder / "sums.jsonl"
    rows.write_text(rows.read_text().replace("one", "1"))
    names.append(file())
    definition = dtt.folder / "sums.yaml"
    definition.write_text(definition.read_text().replace("Q:", "Question:"))
    names.append(file())
    write_checkpoint(dtt.folder / job, 15)
    shutil.rmtree(dtt.folder / job / "checkpoints/step-000010")
    (dtt.folder / job / "checkpoints/step-000015").rename(dtt.folder / job / "checkpoints/moved")
    write_checkpoint(dtt.folder / job, 10, says={1: 2})
    names.append(file())
    assert len(set(names)) == len(names)
    assert file() == names[-1]


def test_all_checkpoints_are_evaluated_and_damaged_ones_are_named(dtt: Dtt, job: Path) -> None:
    write_checkpoint(dtt.folder / job, 15)
    [weights] = (dtt.folder / job / "checkpoints/step-000010").glob("model-*")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = dtt("eval", job, "--step", "all", "--tasks", "pages.yaml", "--json", expect=65)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines] == [5, 15]
    assert "skipped jobs/tiny@10" in done.stderr
    assert "1 of 3 checkpoints are damaged" in done.stderr
    values = [line["scores"]["bits_per_byte"]["value"] for line in lines]
    mean = sum(values) / 2
    noise = math.sqrt(sum((value - mean) ** 2 for value in values)) / mean
    assert lines[0]["noise"] == {}
    assert lines[1]["noise"]["bits_per_byte"] == pytest.approx(noise)


def test_without_a_step_the_newest_intact_checkpoint_is_evaluated(dtt: Dtt, job: Path) -> None:
    [weights] = (dtt.folder / job / "checkpoints/step-000010").glob("model-*")
    weights.write_bytes(b"")
    done = dtt("eval", job, "--tasks", "pages.yaml", "--json")
    assert json.loads(done.stdout)["step"] == 5
    assert "skipped jobs/tiny@10" in done.stderr


def test_keys_of_the_job_are_defaults_of_the_options(dtt: Dtt, job: Path) -> None:
    config = dtt.folder / job / "config.yaml"
    config.write_text(
        config.read_text() + "eval: {tasks: [sums.yaml], limit: 9, shots: 1, keep_samples: true}\n"
    )
    [line] = evaluated(Dtt(dtt.folder / "jobs"), "tiny")
    assert (line["task"], line["n"], line["shots"], line["limit"]) == ("sums", 9, 1, 9)
    prompts = [record["contexts"][0] for record in records(Dtt(dtt.folder / "jobs"), line)]
    assert all(prompt.count("Q: ") == 2 for prompt in prompts)
    [line] = evaluated(dtt, job, "eval.limit=4")
    assert (line["n"], line["shots"]) == (4, 1)


def test_an_export_has_the_scores_of_its_job(dtt: Dtt, job: Path) -> None:
    dtt("export", job, "export.dtype=fp32", "--out", "exports/tiny")
    ours = evaluated(dtt, job, "--tasks", ALL_TASKS)
    theirs = evaluated(dtt, "exports/tiny", "--tasks", ALL_TASKS)
    assert [line["scores"] for line in theirs] == [line["scores"] for line in ours]
    assert {str(Path(line["file"]).parent) for line in theirs} == {"evals/tiny"}
    weights = dtt.folder / "exports/tiny/model.safetensors"
    again = evaluated(dtt, "exports/tiny", "--tasks", "sums.yaml")
    assert again[0]["file"] == theirs[0]["file"]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    [changed] = evaluated(dtt, "exports/tiny", "--tasks", "sums.yaml")
    assert changed["file"] != theirs[0]["file"]


def test_a_chat_model_is_asked_in_its_format(dtt: Dtt, tmp_path: Path) -> None:
    """The model answers every message with `yes`, and then ends its turn, also without --chat."""
    job = write_chat_job(tmp_path, "yes")
    assert DataManifest.read(job).until_ids == (256, IM_END)
    rows = [{"q": "Well?\n", "a": "yes"}, {"q": "Or?\n", "a": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asked.yaml").write_text(
        "type: generation\ndata: {file: rows.jsonl}\nprompt: '{q}'\nanswer: '{a}'\nmax_tokens: 9\n"
    )
    [line] = evaluated(dtt, "jobs/tiny", "--tasks", "asked.yaml", "--chat")
    assert [record["answer"] for record in records(dtt, line)] == ["yes", "yes"]
    assert line["scores"]["exact_match"]["value"] == 0.5
    [plain] = evaluated(dtt, "jobs/tiny", "--tasks", "asked.yaml")
    assert plain["file"] != line["file"]
    assert [record["answer"] for record in records(dtt, plain)] == ["yes", "yes"]


MISTAKES = [
    (["jobs/tiny"], 2, "no tasks to evaluate"),
    (["jobs/tiny", "--tasks", "no-such-task"], 2, "no task or suite"),
    (["jobs/tiny", "--tasks", "sums.yaml", "--step", "7"], 66, "there are: 5, 10"),
    (["jobs/tiny", "--tasks", "sums.yaml", "--step", "x"], 2, "--step x is not a step"),
    (["jobs/tiny@5", "--tasks", "sums.yaml", "--step", "6"], 2, "names another step than 6"),
    (["jobs/tiny", "--tasks", "sums.yaml", "--ema"], 66, "no moving average"),
    (["jobs/tiny", "--tasks", "sums.yaml", "--chat"], 2, "has no chat template"),
    (["jobs/nothing", "--tasks", "sums.yaml"], 66, "no model in jobs/nothing"),
    (["compare", "jobs/tiny"], 2, "takes one model, or `compare` and two"),
    (["jobs/tiny", "piqa", "copa"], 2, "dtt eval jobs/tiny --tasks piqa,copa"),
    (["jobs/tiny@5", "jobs/tiny@10"], 2, "dtt eval compare JOB[@STEP] JOB[@STEP]"),
    (["jobs/tiny@5", "--step", "all", "--tasks", "sums.yaml"], 2, "contradict each other"),
    (["jobs/tiny", "eval.bos=allways"], 2, "eval.bos"),
    (["jobs/tiny", "eval.bus=always"], 2, "eval.bos"),
    (["jobs/tiny", "eval.every=5"], 2, "does not read eval.every"),
    (["jobs/tiny", "train.steps=5"], 2, "does not read train.steps"),
    (["jobs/tiny", "--tasks", "x", "eval.tasks=[y]"], 2, "--tasks and eval.tasks are both given"),
]


def test_a_key_may_remove_what_the_configuration_of_the_job_sets() -> None:
    assert with_keys(["jobs/a", "eval.limit=null"], ()) == (["jobs/a"], {"limit": None})


@pytest.mark.parametrize(("arguments", "code", "why"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_named(dtt: Dtt, job: Path, arguments: list[str], code: int, why: str) -> None:
    assert why in dtt("eval", *arguments, expect=code).stderr


def result_files(folder: Path) -> dict[str, bytes]:
    """The content of all result files of step 10."""
    paths = (folder / "jobs/tiny/evals/step-000010").glob("*.jsonl")
    return {path.name: path.read_bytes() for path in sorted(paths)}


def test_any_number_of_processes_writes_the_same_files(job: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 3):
        on_ranks(ranks, evaluate_in_small_blocks, str(tmp_path))
        found.append(result_files(tmp_path))
        shutil.rmtree(tmp_path / "jobs/tiny/evals")
    assert len(found[0]) == len(DEFINITIONS)
    assert all(content.count(b'"block"') > 2 for content in found[0].values())
    assert found[0] == found[1] == found[2]


def test_an_evaluation_that_is_killed_at_any_time_continues_to_the_same_files(
    job: Path, tmp_path: Path
) -> None:
    """Killed when the files have reached a random size, and continued by the next process."""
    on_ranks(1, evaluate_in_small_blocks, str(tmp_path))
    complete = result_files(tmp_path)
    evals = tmp_path / "jobs/tiny/evals"
    shutil.rmtree(evals)
    total = sum(map(len, complete.values()))
    sizes = sorted(random.Random(SEED).randrange(total) for _ in range(KILLS))
    while True:
        size = sizes[0] if sizes else math.inf
        process = CONTEXT.Process(target=evaluate_alone, args=(str(tmp_path),), daemon=True)
        process.start()
        while process.is_alive() and sum(p.stat().st_size for p in evals.glob("*/*.jsonl")) < size:
            time.sleep(0.001)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            sizes.pop(0)
        elif sizes:  # too late: again from the start
            shutil.rmtree(evals)
        else:
            break
    assert process.exitcode == 0
    assert result_files(tmp_path) == complete


def test_ranks_of_torchrun_evaluate_together_and_rank_0_prints(dtt: Dtt, job: Path) -> None:
    done = forked_runs.run(dtt, "eval", job, "--tasks", "sums.yaml,replies.yaml", "--json", ranks=2)
    assert [json.loads(line)["task"] for line in done.stdout.splitlines()] == ["sums", "replies"]
    failed = forked_runs.start(dtt, "eval", job, "--tasks", "nothing.yaml", ranks=2).wait()
    assert failed.returncode == 66
    assert failed.stderr.count("no task file") == 1


def test_a_stop_request_ends_it_and_the_same_command_continues(dtt: Dtt, job: Path) -> None:
    write_tasks(dtt.folder, questions=4000)
    process = dtt.start("eval", job, "--tasks", "sums.yaml", "--json", "eval.batch_tokens=512")
    lock = dtt.folder / job / "evals/step-000010"
    wait_until(lambda: any(path.stat().st_size for path in lock.glob("sums-*.jsonl")), process)
    process.terminate()
    done = Dtt.wait(process)
    assert done.returncode == 75, done.stderr
    assert "run the same command again" in done.stderr


def test_no_answer_of_a_diverged_model_is_recorded(
    dtt: Dtt, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(job: Path, seed: int, says: dict[int, int] | None) -> Decoder:
        model = make_model(job, seed, says)
        with torch.no_grad():
            model.norm.weight.fill_(math.nan)
        return model

    monkeypatch.setattr(tiny_job, "make_model", diverged)
    write_checkpoint(dtt.folder / job, 20)
    done = dtt("eval", job, "--tasks", "sums.yaml", expect=76)
    assert "log-probabilities are not finite" in done.stderr
    [path] = (dtt.folder / job / "evals/step-000020").glob("sums-*.jsonl")
    assert read(path).records == []
