"""Compare the scores of `dtt eval` with those of lm-evaluation-harness, question by question.

    python tests/support/lm_eval_oracle.py                       every question, every family
    python tests/support/lm_eval_oracle.py --families gpt2 --questions 100

Tiny models, trained for 40 steps (`--steps`), fp32, on a CPU. Their context is 128 tokens, so that
some questions are truncated; attention windows are 32 tokens. dtt and lm-eval's `hf` backend read
the same folder. lm-eval adds log-probabilities in fp64: a float32 of -1024 has steps of 1.2e-4.
Most families use a BPE of 4,000 tokens, trained on the questions; mistral uses Mistral's own
tokenizer, which adds a token in front of a text.

The questions are 1,000 of HellaSwag, and all of PIQA, OpenBookQA and LAMBADA whose answers fit into
the context, from `$DTT_SHARED/data/eval`; `rolling` is text of 0, 1, L - 1, L, L + 1, 2L and 3L + 7
tokens, where L is the context.

`difference`: the largest difference of a log-likelihood, in nats; of `rolling`, relative. `close`:
questions on which two choices are closer than twice that, so that either program may choose either.
`acc`, `acc_norm`, `perplexity` (of `rolling`, per byte): of dtt. The script fails if these differ
from those of lm-eval by more than the close questions, if perplexities differ by 1e-5, or if a
log-likelihood differs by 1e-4 (1e-6 for `rolling`).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.config.model import Llama3RopeScaling, ModelConfig
from dtt.evaluate.tasks import result_files
from dtt.hf import publish, write_folder
from dtt.hf.read import LoadedModel
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize

SHARED_DATA = Path(os.environ.get("DTT_SHARED", Path(__file__).parents[3] / "shared")) / "data"
CONTEXT, STEPS = 128, 40
GROUPED: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"dim": 64, "n_layers": 2, "n_heads": 4},
    "llama": GROUPED | {"rope_scaling": Llama3RopeScaling(original_max_seq_len=32)},
    "qwen3": GROUPED | {"head_dim": 32},
    "mistral": GROUPED | {"window": 32},
    "gemma3": GROUPED | {"head_dim": 32, "window": 32, "window_pattern": 2},
    "phi3": GROUPED | {"window": 32},
}
FILES = {
    "hellaswag": "hellaswag_val1000.jsonl",
    "piqa": "piqa.jsonl",
    "openbookqa": "openbook_qa.jsonl",
    "lambada": "lambada_openai.jsonl",
}
END = "<|endoftext|>"
COLUMNS = ("questions", "difference", "close", "acc", "acc_norm", "perplexity", "s")
ROW = "{:9}{:13}{:>10}{:>12}{:>7}{:>9}{:>10}{:>14}{:>7}"
Rows = list[dict[str, Any]]
Run = Callable[[list[str], Path], object]
"""Runs a dtt command with these arguments in a folder."""


def main() -> None:
    """Print a row per family and task; exit with 1 if a score differs."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(MODELS))
    parser.add_argument("--questions", type=int, help="number of questions of each task")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of training steps")
    options = parser.parse_args()
    questions = read_questions(options.questions)
    bpe = train_tokenizer(text for rows in questions.values() for text in texts_of(rows))
    llama = Tokenizer.from_file(str(SHARED_DATA / "tokenizers/mistral-v1/tokenizer.json"))
    print(
        f"torch {torch.__version__}, transformers {metadata.version('transformers')}, "
        f"lm-eval {metadata.version('lm_eval')}"
    )
    print(ROW.format("family", "task", *COLUMNS))
    wrong = []
    for family in options.families.split(","):
        own, end = (llama, "</s>") if family == "mistral" else (bpe, END)
        tasks = {name: fitting(rows, own) for name, rows in questions.items()}
        if family != "mistral":  # lm-eval predicts an added token, too
            tasks["rolling"] = rolling_texts(" ".join(texts_of(tasks["lambada"][:40])), own)
        start = time.monotonic()
        for name, one in compare_family(family, own, end, tasks, steps=options.steps).items():
            metrics = one.metrics
            perplexity = metrics.get("perplexity") or metrics.get("byte_perplexity")
            shares = (f"{metrics[m][0]:.4f}" if m in metrics else "" for m in ("acc", "acc_norm"))
            counted = f"{one.questions:,}", f"{one.difference:.1e}", str(one.close), *shares
            found = f"{perplexity[0]:.6g}" if perplexity else ""
            print(ROW.format(family, name, *counted, found, f"{time.monotonic() - start:.0f}"))
            wrong += [f"{family} {name}: {problem}" for problem in one.problems(name == "rolling")]
    if wrong:
        sys.exit("\n".join(wrong))


# ---- questions -----------------------------------------------------------------------------------


def read_questions(count: int | None) -> dict[str, Rows]:
    """Return the first `count` questions of each task, with the same keys in all tasks."""
    rows = {}
    for name, file in FILES.items():
        with (SHARED_DATA / "eval" / file).open(encoding="utf-8") as lines:
            rows[name] = [json.loads(line) for line in lines][:count]
        for number, row in enumerate(rows[name]):
            row["context"] = row.pop("query", None) or row["context"]
            row["id"] = number
    return rows


def texts_of(rows: Rows) -> Iterator[str]:
    """Yield each question with all of its answers."""
    for row in rows:
        yield " ".join([row["context"], *answers_of(row)])


def answers_of(row: dict[str, Any]) -> list[str]:
    """Return the answers of a question that are scored."""
    answers: list[str] = row.get("choices") or [row["continuation"]]
    return answers


def fitting(rows: Rows, tokenizer: Tokenizer) -> Rows:
    """Return the questions whose answers fit into the context, as lm-eval requires."""
    return [
        row
        for row in rows
        if all(len(tokenizer.encode(f"\n {text}").ids) <= CONTEXT for text in answers_of(row))
    ]


def rolling_texts(text: str, tokenizer: Tokenizer) -> Rows:
    """Return prefixes of `text` that have 0, 1, L - 1, L, L + 1, 2L and 3L + 7 tokens."""
    lengths = (0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 3 * CONTEXT + 7)
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    texts = [text[: offsets[length - 1][1] if length else 0] for length in lengths]
    return [{"id": i, "text": part} for i, part in enumerate(texts)]


# ---- models --------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Return a byte-level BPE of 4,000 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4000,
            special_tokens=[END],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return tokenizer


def train(model: Decoder, ids: Sequence[int], steps: int) -> None:
    """Train for a few steps on token ids, so that predictions differ as those of a model do."""
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = torch.tensor(ids).unfold(0, CONTEXT + 1, CONTEXT)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (8,), generator=generator)]
        optimizer.zero_grad()
        (model(batch[:, :-1], batch[:, 1:]).loss / batch[:, 1:].numel()).backward()
        optimizer.step()


def export(
    family: str,
    tokenizer: Tokenizer,
    end: str,
    tasks: Mapping[str, Rows],
    out: Path,
    steps: int = STEPS,
) -> Path:
    """Write a briefly trained model as a Hugging Face folder, which transformers verifies."""
    cfg = ModelConfig.model_validate({"family": family, **MODELS[family]})
    arch = families.get(family).architecture(cfg, tokenizer.get_vocab_size(), CONTEXT)
    model = Decoder(arch)
    texts = [text for name, rows in tasks.items() if name != "rolling" for text in texts_of(rows)]
    encoded = tokenizer.encode_batch(texts[:1000], add_special_tokens=False)
    train(model, [id for one in encoded for id in one.ids], steps)
    path = out.with_suffix(".json")
    tokenizer.save(str(path))
    id_of_end = tokenizer.token_to_id(end)
    assert id_of_end is not None
    trained = LoadedModel(arch, model.state_dict(), path, id_of_end, (id_of_end,))
    origin = publish.ExportSource(family, 0, "")
    write_folder.export(trained, origin, out, dtype="fp32", max_shard_size="5GB", card="")
    shutil.copy(path, out / "tokenizer.json")  # an export adds no token in front of a text
    return out


# ---- lm-eval -------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Scores of a task: its metrics, and the log-likelihoods of each question."""

    metrics: dict[str, float]
    log_likelihoods: list[list[float]] = field(default_factory=list)
    greedy: list[list[bool]] = field(default_factory=list)


def harness_task(name: str, rows: Rows, file: Path) -> dict[str, Any]:
    """Return the task's definition for lm-eval."""
    task: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(file.parent)},
        "test_split": "test",
        "num_fewshot": 0,
    }
    if "choices" in rows[0]:
        metrics = ["acc", "acc_norm"]
        task |= {"output_type": "multiple_choice", "doc_to_choice": "choices"}
        task |= {"doc_to_text": "context", "doc_to_target": "gold"}
    elif "continuation" in rows[0]:
        metrics = ["acc", "perplexity"]
        task |= {"output_type": "loglikelihood"}
        task |= {"doc_to_text": "context", "doc_to_target": "{{' ' + continuation}}"}
    else:
        metrics = ["byte_perplexity", "word_perplexity"]
        task |= {"output_type": "loglikelihood_rolling"}
        task |= {"doc_to_text": "", "doc_to_target": "text"}
    return task | {"metric_list": [{"metric": metric} for metric in metrics]}


def harness_scores(folder: Path, tasks: Mapping[str, Rows], work: Path) -> dict[str, Scores]:
    """Return the scores that lm-eval computes with transformers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = HFLM(str(folder), device="cpu", dtype="float32", softmax_dtype="float64", batch_size=32)
    definitions = [harness_task(name, rows, work / f"{name}.jsonl") for name, rows in tasks.items()]
    loaded = TaskManager(include_defaults=False).load(definitions)
    found = lm_eval.evaluate(model, loaded, bootstrap_iters=0)
    scores = {}
    for name in tasks:
        metrics = {
            metric.removesuffix(",none"): value
            for metric, value in found["results"][name].items()
            if metric.endswith(",none") and isinstance(value, float)
        }
        scores[name] = Scores(metrics)
        for sample in found["samples"][name]:
            answers = [one[0] for one in sample["resps"]]
            if name == "rolling":
                scores[name].log_likelihoods.append(answers)
                continue
            scores[name].log_likelihoods.append([float(one[0]) for one in answers])
            scores[name].greedy.append([bool(one[1]) for one in answers])
    return scores


# ---- dtt -----------------------------------------------------------------------------------------


def dtt_task(rows: Rows, file: Path) -> dict[str, Any]:
    """Return the task's definition for dtt."""
    task: dict[str, Any] = {"data": {"file": str(file)}, "id": "{id}"}
    if "choices" in rows[0]:
        task |= {"type": "multiple_choice", "choices": "{choices}", "gold": "{gold}"}
    elif "continuation" in rows[0]:
        task |= {"type": "cloze", "answer": "{continuation}"}
    else:
        return task | {"type": "rolling", "answer": "{text}"}
    return task | {"prompt": "{context}"}


def dtt_scores(folder: Path, tasks: Mapping[str, Rows], work: Path, run: Run) -> dict[str, Scores]:
    """Return the scores that `dtt eval` writes to its result files."""
    for name, rows in tasks.items():
        definition = dtt_task(rows, work / f"{name}.jsonl")
        (work / f"{name}.yaml").write_text(json.dumps(definition))
    files = ",".join(str(work / f"{name}.yaml") for name in tasks)
    run(["eval", str(folder), "--tasks", files], work)
    scores = {}
    for name in tasks:
        [path] = (work / "evals" / folder.name).glob(f"{name}-*.jsonl")
        content = result_files.read(path)
        assert content.result is not None
        metrics = {metric: score.value for metric, score in content.result.scores.items()}
        records = {record["id"]: record for record in content.records}
        ordered = [records[str(row["id"])] for row in tasks[name]]
        scores[name] = Scores(
            metrics,
            [one.get("log_likelihoods") or [one["log_likelihood"]] for one in ordered],
            [one.get("greedy", []) for one in ordered],
        )
    return scores


# ---- comparison ----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """The differences between the scores of a task."""

    questions: int
    difference: float
    """Largest difference of a log-likelihood, in nats; of `rolling`, relative."""
    close: int
    """Questions on which two choices are closer than twice the difference, so that either program
    may choose either."""
    greedy: int
    """Answers that only one of the programs finds to be the most likely one."""
    metrics: dict[str, tuple[float, float]]
    """Each metric of dtt and of lm-eval."""

    def problems(self, rolling: bool) -> list[str]:
        """Return what is not equal."""
        found = []
        if self.difference > (1e-6 if rolling else 1e-4):
            found.append(f"a log-likelihood differs by {self.difference:.1e}")
        for name, (ours, theirs) in self.metrics.items():
            if "perplexity" in name:
                equal = math.isclose(ours, theirs, rel_tol=1e-5)
            else:
                equal = abs(ours - theirs) <= (self.close + self.greedy) / self.questions
            if not equal:
                found.append(f"{name} is {ours}, of lm-eval {theirs}")
        return found


def compare(ours: Scores, theirs: Scores, rolling: bool) -> Comparison:
    """Return the differences between two scores of a task."""
    pairs = list(zip(ours.log_likelihoods, theirs.log_likelihoods, strict=True))
    differences = [
        abs(a - b) / (max(1.0, abs(b)) if rolling else 1.0)
        for mine, other in pairs
        for a, b in zip(mine, other, strict=True)
    ]
    largest = max(differences)
    close = sum(
        len(other) > 1 and sorted(other)[-1] - sorted(other)[-2] <= 2 * largest
        for _, other in pairs
    )
    greedy = sum(a != b for a, b in zip(ours.greedy, theirs.greedy, strict=False))
    common = ours.metrics.keys() & theirs.metrics.keys()
    metrics = {name: (ours.metrics[name], theirs.metrics[name]) for name in sorted(common)}
    return Comparison(len(pairs), largest, close, greedy, metrics)


def run_dtt(arguments: list[str], folder: Path) -> None:
    """Run a dtt command, which must succeed, in a process of its own."""
    subprocess.run(
        [sys.executable, "-m", "dtt.main", *arguments],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def compare_family(
    family: str,
    tokenizer: Tokenizer,
    end: str,
    tasks: Mapping[str, Rows],
    run: Run = run_dtt,
    steps: int = STEPS,
) -> dict[str, Comparison]:
    """Return the comparison of each task with an export of a model of `family`."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, rows in tasks.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (work / f"{name}.jsonl").write_text(lines)
        out = export(family, tokenizer, end, tasks, work / family, steps)
        ours = dtt_scores(out, tasks, work, run)
        theirs = harness_scores(out, tasks, work)
    return {name: compare(ours[name], theirs[name], rolling=name == "rolling") for name in tasks}


if __name__ == "__main__":
    main()
