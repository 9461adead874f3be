"""`dtt eval` and lm-evaluation-harness: same log-likelihoods and metrics, and its tasks on a model
of dtt. `tests/lm_eval_oracle.py` compares every question of four tasks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked_runs
import lm_eval_oracle as oracle
import pytest
import yaml
from forked import run_dtt
from running import Dtt
from tiny_job import END_OF_DOCUMENT, IM_END, write_chat_job, write_job
from tokenizers import processors

from dtt.base.errors import ConfigError, EnvironmentUnfit, InputError
from dtt.base.ranks import Ranks
from dtt.config.evaluation import EvalConfig
from dtt.evaluate import harness as eval_harness
from dtt.evaluate import harness_model as harness_model_module
from dtt.evaluate.evaluation import Evaluation
from dtt.evaluate.harness_model import language_model
from dtt.evaluate.models import find_models
from dtt.hf import hf
from dtt.mesh import dist

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
    """The folder of a job and of two tasks for lm-eval."""
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
    choices = {"output_type": "multiple_choice", "doc_to_choice": "choices"}
    answers = {
        "output_type": "generate_until",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 9},
    }
    for name, keys in (
        ("choices", choices | {"doc_to_target": "gold", "metadata": {"version": 3.0}}),
        ("answers", answers | {"doc_to_target": "{{choices[0]}}"}),
    ):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | common | keys))
    return folder


def test_a_task_of_lm_eval_is_evaluated_and_recorded_beside_the_other_results(job: Path) -> None:
    arguments = ["eval", "jobs/tiny", "--harness", "choices.yaml", "--limit", "20"]
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
import os, pathlib, time
import datasets

def rows(**kwargs):
    rank = os.environ.get("RANK", "0")
    time.sleep(0.3 * (rank == "0"))
    with open("loaded.txt", "a") as file:
        file.write(rank)
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


def test_rank_0_loads_the_tasks_first_and_errors_are_shared(coded: Path) -> None:
    dtt = Dtt(coded)
    arguments = ("eval", "jobs/tiny", "--harness", "coded.yaml", "--json")
    done = forked_runs.run(dtt, *arguments, ranks=2)
    assert json.loads(done.stdout)["model"] == "jobs/tiny@10"
    assert (coded / "loaded.txt").read_text() == "01"
    (coded / "offline").touch()
    failed = forked_runs.start(dtt, *arguments, ranks=2).wait()
    assert failed.returncode == 66
    assert failed.stderr.count("no route to host") == 1
    assert (coded / "loaded.txt").read_text() == "010"


def harness_model(source: Path) -> Any:
    """The newest checkpoint of a job, as lm-eval sees it."""
    world = dist.start(Ranks(), "cpu")
    [model, *_] = find_models(str(source), None)
    return language_model(Evaluation(EvalConfig(), ()).runner(model.load(), world), None, "name")


def test_answers_are_those_of_lm_eval_with_transformers(job: Path, tmp_path: Path) -> None:
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    [model, *_] = find_models(str(job / "jobs/tiny"), None)
    origin = hf.Origin("tiny", 10, "")
    hf.export(
        model.load(), origin, tmp_path / "export", dtype="fp32", max_shard_size="5GB", card=""
    )
    files = [str(job / "choices.yaml"), str(job / "answers.yaml")]
    found = []
    for lm in (
        harness_model(job / "jobs/tiny"),
        HFLM(str(tmp_path / "export"), device="cpu", dtype="float32", max_length=128),
    ):
        tasks = TaskManager(include_defaults=False).load(files)
        for task in tasks["tasks"].values():
            task.set_config("num_fewshot", 0)
        found.append(evaluate(lm, tasks, bootstrap_iters=0))
    ours, theirs = found
    assert ours["results"] == theirs["results"]
    replies = [[one["resps"] for one in result["samples"]["answers"]] for result in found]
    assert replies[0] == replies[1]
    assert any(reply[0][0] for reply in replies[0])


def requested(kind: str, *requests: tuple[str, int, str, Any]) -> list[Any]:
    """Requests of lm-eval: (task, document, context, continuation or options)."""
    from lm_eval.api.instance import Instance

    return [
        Instance(kind, {}, (context, what), i, (task, document, 1))
        for i, (task, document, context, what) in enumerate(requests)
    ]


def test_only_requests_of_a_document_are_scored_together_and_in_blocks(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = harness_model(job / "jobs/tiny")
    requests = requested(
        "loglikelihood",
        *(("pairs", i // 2, "", f"sentence {i}") for i in range(6)),
        *(("other", 2, "", f"sentence {i}") for i in range(6, 8)),
    )
    alone = [lm.loglikelihood([request])[0] for request in requests]
    blocks, scores = [], lm._scores

    def scored(block: list[Any]) -> Any:
        blocks.append(block)
        return scores(block)

    monkeypatch.setattr(harness_model_module, "FIRST_BLOCK", 25)
    monkeypatch.setattr(lm, "_scores", scored)
    together = lm.loglikelihood(requests)
    assert [[len(options) for options in block] for block in blocks] == [[2, 2], [2, 2]]
    assert [one[1] for one in together] == [one[1] for one in alone]
    assert [one[0] for one in together] == pytest.approx([one[0] for one in alone], abs=1e-4)


def test_a_task_that_draws_its_answers_is_refused(job: Path) -> None:
    from lm_eval.api.instance import Instance

    options = {"do_sample": True, "temperature": 0.7, "until": []}
    request = Instance("generate_until", {}, ("one", options), 0, ("sampled", 0, 1))
    with pytest.raises(ConfigError, match="the task sampled draws its answers"):
        harness_model(job / "jobs/tiny").generate_until([request])


def test_conversations_are_rendered_with_the_template_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtt.hf.model_source import find_chat_format

    job = write_chat_job(tmp_path, "Fine.")
    world = dist.start(Ranks(), "cpu")
    [model] = find_models(str(job), None)
    chat, _ = find_chat_format(str(job), None)
    runner = Evaluation(EvalConfig(), ()).runner(model.load(), world)
    lm = language_model(runner, chat, "name")
    asked = [{"role": "user", "content": "How?"}]
    text = lm.apply_chat_template(asked)
    assert text == "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    begun = [*asked, {"role": "assistant", "content": "The answer is"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith(
        "<|im_start|>assistant\nThe answer is"
    )
    assert lm.chat_template(True) == chat.template
    assert runner.until_ids == (END_OF_DOCUMENT, IM_END)
    from lm_eval.api.instance import Instance

    options = {"until": [], "max_gen_toks": 20}
    request = Instance("generate_until", {}, (text, options), 0, ("chat", 0, 1))
    assert lm.generate_until([request]) == ["Fine."]

    replies: list[list[int]] = []
    generate = type(runner.generator).generate

    def recorded(*arguments: Any) -> Any:
        replies.extend(generate(*arguments) or ())
        return replies[-1:]

    monkeypatch.setattr(type(runner.generator), "generate", recorded)
    until = {"until": ["n", ""], "max_gen_toks": 20}
    assert lm.generate_until(requested("generate_until", ("chat", 0, text, until))) == ["Fi"]
    assert len(replies[-1]) == 2  # it is not continued after "n"
    stop = runner.encoder.tokenizer.token_to_id("i")
    facts = chat.facts.model_copy(update={"stop_tokens": (stop,)})
    lm = language_model(runner, replace(chat, facts=facts), "name")
    assert lm.generate_until([request]) == ["F"]


def test_without_lm_eval_the_command_to_install_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)  # as if it were not there
    with pytest.raises(EnvironmentUnfit, match="requires lm-eval, which is not installed") as error:
        eval_harness._task_index(["mmlu"])
    assert "pip install" in str(error.value)


def test_a_file_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match=r"no task file none\.yaml"):
        eval_harness._task_index(["none.yaml"])


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*hellaswag"):
        eval_harness._task_index(["helaswag"])
