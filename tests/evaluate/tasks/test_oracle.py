"""`dtt eval` and lm-evaluation-harness: same log-likelihoods and metrics, and its tasks on a model
of dtt. `tests/support/lm_eval_oracle.py` compares every question of four tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import lm_eval_oracle as oracle
from support.forked import run_dtt
from support.tiny_job import write_chat_job, write_job
from tokenizers import processors

from dtt.base.errors import ConfigError, EnvironmentUnfit, InputError
from dtt.base.ranks import Ranks
from dtt.evaluate import harness as eval_harness

FAMILIES = ("gpt2", "llama", "qwen3", "mistral", "gemma3", "phi3")
ROWS = [
    {"id": i, "context": f"{'Long ago, ' * (i % 3 * 20)}{i} and {i + 1} are{' ' * (i % 2)}",
     "choices": [f"{2 * i + 1}.", "no numbers,\nperhaps", "naïve 数"], "gold": i % 3}
    for i in range(24)
]  # fmt: skip


def run(arguments: list[str], folder: Path) -> str:
    code, out, err = run_dtt(arguments, folder, {}, 170)
    assert code == 0, err
    return out


@pytest.mark.slow(except_for=["gpt2", "gemma3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_lm_eval_with_transformers(family: str) -> None:
    cloze = [{"id": row["id"], "context": row["context"], "continuation": "1."} for row in ROWS]
    tasks = {"choices": ROWS, "cloze": cloze}
    bpe = oracle.train_tokenizer(text for rows in tasks.values() for text in oracle.texts_of(rows))
    if family == "phi3":  # as published tokenizers that add a token in front
        end = (oracle.END, bpe.token_to_id(oracle.END))
        bpe.post_processor = processors.TemplateProcessing(f"{end[0]} $A", None, [end])
    else:
        tasks["rolling"] = oracle.rolling_texts("A text of many words. " * 300, bpe)
    compared = oracle.compare_family(family, bpe, oracle.END, tasks, run)
    assert set(compared) == set(tasks)
    for name, one in compared.items():
        assert one.problems(rolling=name == "rolling") == []
        assert len(one.metrics) == 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job and of a task for lm-eval."""
    folder = tmp_path_factory.mktemp("harness")
    write_job(folder, 128)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")
        },
        "test_split": "test",
        "doc_to_text": "context",
    }  # fmt: skip
    keys = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    task = {"task": "choices", "metadata": {"version": 3.0}} | common | keys
    (folder / "choices.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.slow
def test_a_task_of_lm_eval_is_evaluated_and_recorded_beside_the_other_results(job: Path) -> None:
    arguments = ["eval", "jobs/tiny", "--harness", "choices.yaml", "eval.limit=20"]
    code, out, err = run_dtt(arguments, job, {}, 170)
    assert code == 0, err
    assert "may run Python code" in err
    assert "acc_norm" in out
    [path] = (job / "jobs/tiny/evals/step-000010").glob("harness-*.json")
    record = json.loads(path.read_text())
    assert record["n-samples"] == {"choices": {"original": 24, "effective": 20}}
    assert (record["lm_eval"], record["versions"]["choices"]) == ("0.4.13", 3.0)
    assert record["model"] == "jobs/tiny@10"
    assert f"{record['results']['choices']['acc,none']:.4f}".rstrip("0") in out


HELPERS = """
import pathlib
import datasets

def rows(**kwargs):
    if pathlib.Path("offline").exists():
        raise ConnectionError("no route to host")
    row = {"context": "one", "choices": ["1", "2"], "gold": 0}
    return {"test": datasets.Dataset.from_list([row])}

def keep(resps, docs):
    return [one[0] for one in resps]
"""
CODED = """
task: coded
custom_dataset: !function helpers.rows
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: gold
filter_list:
  - {name: kept, filter: [{function: custom, filter_fn: !function helpers.keep}]}
"""


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """The folder of a job and of a task that contains functions."""
    write_job(tmp_path, 128)
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "coded.yaml").write_text(CODED)
    return tmp_path


@pytest.mark.slow
def test_a_task_with_functions_is_printed_as_json(coded: Path) -> None:
    out = run(["eval", "jobs/tiny", "--harness", "coded.yaml", "--json"], coded)
    [path] = (coded / "jobs/tiny/evals/step-000010").glob("harness-*.json")
    assert json.loads(out) == json.loads(path.read_text())


def test_tasks_that_cannot_be_loaded_are_named_before_weights_are_read(coded: Path) -> None:
    for weights in (coded / "jobs/tiny/checkpoints").glob("*/model-*"):
        weights.write_bytes(b"")
    (coded / "offline").touch()
    code, _, err = run_dtt(["eval", "jobs/tiny", "--harness", "coded.yaml"], coded, {}, 170)
    assert code == 66
    assert "no route to host" in err
    assert "skipped" not in err


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "detect", lambda: Ranks(0, 2))
    with pytest.raises(ConfigError, match="one process, not in 2"):
        eval_harness.run("jobs/tiny", ["choices"])


@pytest.mark.slow
def test_a_chat_model_answers_in_its_conversation_format(tmp_path: Path) -> None:
    job = write_chat_job(tmp_path, "Fine.")
    (tmp_path / "rows.jsonl").write_text('{"question": "How?", "answer": "Fin"}\n')
    task = {
        "task": "asked",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}, "cache_dir": "cache"},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(task))
    for chat, score in (("--chat", 1.0), ("--json", 0.0)):
        out = run(["eval", "jobs/tiny", "--harness", "asked.yaml", "--json", chat], tmp_path)
        assert json.loads(out)["results"]["asked"]["exact_match,none"] == score
    assert not [*job.glob("evals/*/.harness*")], "the temporary export is left"


def test_without_lm_eval_the_command_to_install_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)  # as if it were not there
    with pytest.raises(EnvironmentUnfit, match="requires lm-eval and accelerate") as error:
        eval_harness._task_index(["mmlu"])
    assert "pip install" in str(error.value)


def test_a_file_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match=r"no task file none\.yaml"):
        eval_harness._task_index(["none.yaml"])


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*hellaswag"):
        eval_harness._task_index(["helaswag"])
