"""Compare scoring of benchmark questions on a CPU by dtt and lm-evaluation-harness, in seconds.

    python benchmarks/eval_speed.py --data FOLDER --tokenizer GPT2/tokenizer.json
        [--tasks HellaSwag OpenBookQA PIQA LAMBADA] [--questions 32] [--rounds 1] [--threads 2]
        [--batch-sizes 1 4 16 32] [--batch-tokens 8192]

Random weights in the shape of GPT-2 (124M parameters), fp32, converted by dtt's export for the HF
backend of lm-evaluation-harness, which scores the same token ids. FOLDER has the questions as JSON
lines. The backend first runs at each batch size on a quarter of the questions; the fastest counts.
Rounds alternate between the two; medians count. Two ratios are printed, of wall time and of CPU
time, which other load on the machine affects less. The exit code is 1 if log-likelihoods differ by
more than 1e-4 per nat.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from measurement import Table, column_medians, in_turns, parser_of
from tokenizers import Tokenizer

from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.evaluate.tasks.scorer import Option, Scorer
from dtt.hf.weights import to_hf
from dtt.mesh.dist import start
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize

FILES = {
    "HellaSwag": "hellaswag_val1000.jsonl",
    "OpenBookQA": "openbook_qa.jsonl",
    "PIQA": "piqa.jsonl",
    "LAMBADA": "lambada_openai.jsonl",
}
TOLERANCE = 1e-4

Questions = list[list[Option]]
Scores = list[tuple[float, bool]]


def texts(task: str, row: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the context of a question, and its continuations."""
    if task == "LAMBADA":
        return row["context"], [f" {row['continuation']}"]
    before, after = {"HellaSwag": ("context", ""), "PIQA": ("query", "Answer:")}.get(
        task, ("query", "")
    )
    return row[before] + after, [f" {choice}" for choice in row["choices"]]


def read(path: Path, task: str, tokenizer: Tokenizer, count: int) -> Questions:
    """Return the first questions of a file."""
    questions = []
    for line in path.read_text("utf-8").splitlines()[:count]:
        context, choices = texts(task, json.loads(line))
        before = len(tokenizer.encode(context).ids)
        ids = [tokenizer.encode(context + choice).ids for choice in choices]
        questions.append([Option(tuple(x[:before]), tuple(x[before:])) for x in ids])
    return questions


def models() -> tuple[Decoder, Any]:
    """Return a dtt model and a transformers model with the same weights."""
    cfg = ModelConfig(family="gpt2", dim=768, n_layers=12, n_heads=12)
    family = families.get(cfg.family)
    arch = family.architecture(cfg, 50257, 1024)
    model = Decoder(arch).eval()
    initialize(model, seed=0)
    config = transformers.AutoConfig.for_model(**family.to_hf_config(arch, 0))
    make: Any = transformers.AutoModelForCausalLM.from_config
    hf_model = make(config).eval()
    hf_model.load_state_dict(dict(to_hf(model.state_dict(), arch)), strict=False)
    hf_model.tie_weights()
    return model, hf_model


def timed(run: Callable[[], Scores]) -> tuple[float, float, Scores]:
    """Return the seconds of wall time and of CPU time that `run` took, and its scores."""
    began, busy = time.perf_counter(), time.process_time()
    scores = run()
    return time.perf_counter() - began, time.process_time() - busy, scores


class Harness:
    """The HF backend of lm-evaluation-harness."""

    def __init__(self, model: Any, tokenizer: Path) -> None:
        """Wrap a transformers model."""
        from lm_eval.models.huggingface import HFLM

        make: Any = transformers.PreTrainedTokenizerFast
        fast = make(tokenizer_file=str(tokenizer))
        fast.add_special_tokens({"eos_token": "<|endoftext|>"})
        self.backend = HFLM(
            pretrained=model, tokenizer=fast, device="cpu", batch_size=1, max_length=1024
        )

    def score(self, questions: Questions, batch_size: int) -> Scores:
        """Return the scores of all options."""
        self.backend.batch_size_per_gpu = batch_size
        requests: list[Any] = [
            (("", ""), list(option.context), list(option.continuation))
            for options in questions
            for option in options
        ]
        scores: Scores = self.backend._loglikelihood_tokens(requests, disable_tqdm=True)  # noqa: SLF001
        return scores

    def best_batch_size(self, questions: Questions, sizes: Sequence[int]) -> int:
        """Return the batch size that takes the least CPU time."""
        seconds = {n: timed(partial(self.score, questions, n))[1] for n in sizes}
        return min(seconds, key=seconds.__getitem__)


def difference(ours: Scores, theirs: Scores) -> float:
    """Return the largest relative difference of two log-likelihoods, or exit if greedy differs."""
    worst = 0.0
    for (nats, greedy), (other, also) in zip(ours, theirs, strict=True):
        if greedy != also:
            raise SystemExit("greedy differs")
        worst = max(worst, abs(nats - other) / max(1.0, abs(other)))
    return worst


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--batch-tokens", type=int, default=8192)
    return parser.parse_args()


def main() -> None:
    """Print the seconds of both, and their ratios."""
    args = parse()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model, hf_model = models()
    harness = Harness(hf_model, args.tokenizer)
    scorer = Scorer(model, start(Ranks(), "cpu"), batch_tokens=args.batch_tokens)

    def with_dtt(questions: Questions) -> Scores:
        scores = scorer.score(questions)
        assert scores is not None
        return [(one.log_likelihood, one.greedy) for options in scores for one in options]

    columns = {"batch": 7, "dtt s": 9, "lm-eval s": 11, "ratio": 8, "CPU ratio": 11}
    table = Table("task", 22, columns | {"difference": 12})
    equal = True
    for task in args.tasks:
        path = args.data / FILES[task]
        questions = read(path, task, tokenizer, args.questions)
        few = questions[: max(1, len(questions) // 4)]
        batch = harness.best_batch_size(few, args.batch_sizes)
        alternatives = {
            "dtt": partial(timed, partial(with_dtt, questions)),
            "lm-eval": partial(timed, partial(harness.score, questions, batch)),
        }
        ours, theirs = in_turns(alternatives, args.rounds, warm_up=0).values()
        (wall, cpu), (their_wall, their_cpu) = (
            column_medians(run[:2] for run in runs) for runs in (ours, theirs)
        )
        apart = difference(ours[0][2], theirs[0][2])
        equal &= apart <= TOLERANCE
        cells = f"{batch} {wall:.2f} {their_wall:.2f} {their_wall / wall:.2f} {their_cpu / cpu:.2f}"
        table.row(task, *cells.split(), f"{apart:.1e}")
    raise SystemExit(int(not equal))


if __name__ == "__main__":
    main()
