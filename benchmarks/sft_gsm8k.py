"""Fine-tune a tiny model on GSM8K, and count the held-out answers that stop by themselves.

    python benchmarks/sft_gsm8k.py                 4,000 problems, 4 epochs
    python benchmarks/sft_gsm8k.py --rows 1000 --epochs 1

A Llama of 1M parameters is pretrained on the text of the problems, and then fine-tuned twice from
these weights: with loss masks (only answers are targets) and without (`chat.train_on=all`). All
three models answer the same held-out problems greedily; an answer stops if it ends with the
template's stop token within the limit. The loss is that of the held-out answers' tokens in each
case. The problems and answers are in `$DTT_SHARED/data/sft`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from jobs import SHARED_DATA, dtt

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.load import load_job, resolve
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.loader import BatchReader
from dtt.evaluate.answers import AnswerEvaluator, first_prompts
from dtt.evaluate.validation import Evaluator, held_out
from dtt.mesh import dist
from dtt.model.decoder import Decoder
from dtt.model.scaling import scaled

SEQ_LEN = 512
MODEL = ["model.dim=128", "model.n_layers=4", "model.n_heads=4", "train.precision=fp32"]
BATCHES = [
    f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={8 * SEQ_LEN}", "train.micro_batch=8",
    "train.sample_tokens=0", "train.eval_every=0", "train.log_every=50", "schedule.warmup=5%",
]  # fmt: skip


def chat_keys(tokens: str, train_on: str) -> list[str]:
    """Return the keys of one of the two fine-tuning runs."""
    return [
        f"name={tokens}", "data.type=chat", "download.dataset=train.jsonl",
        "download.out=conversations", "tokenizer.type=file", "tokenizer.path=text/tokenizer.json",
        f"tokenize.out={tokens}", "tokenize.validation_fraction=0.1", f"chat.train_on={train_on}",
        "train.eval_answers=0", "optim.lr=5e-3", "schedule.decay=50%", *MODEL, *BATCHES,
    ]  # fmt: skip


def make_data(folder: Path, rows: int) -> None:
    """Write the first `rows` problems as conversations and as text, and pretrain on the text."""
    with (SHARED_DATA / "sft/gsm8k_train.jsonl").open() as file:
        lines = list(islice(file, rows))
    (folder / "train.jsonl").write_text("".join(lines))
    texts = ("\n".join(m["content"] for m in json.loads(x)["messages"]) for x in lines)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    base = [
        "name=base", "download.dataset=text.jsonl", "download.out=texts", "tokenize.out=text",
        "tokenizer.vocab_size=1024", "tokenizer.chat_tokens=true", "optim.lr=1e-2",
        "train.epochs=2", *MODEL, *BATCHES,
    ]  # fmt: skip
    for command in ("download", "tokenize", "train"):
        dtt(command, *base, folder=folder)


def measure(job: Path, dataset: Dataset, answers: int, limit: int) -> tuple[float, float]:
    """Return the share of greedy answers that stop, and the loss of held-out answers in nats."""
    world = dist.start(Ranks(), "cpu")
    model = Decoder(scaled(load_job(job), dataset.manifest.vocab_size).arch)
    checkpoint = store.newest(JobDir(job).checkpoints)
    assert checkpoint is not None
    model.load_state_dict(checkpoint.tensors(store.MODEL))
    sources = [source for source in dataset.validation if source is not None]
    assert dataset.manifest.chat is not None
    stops, prompts = dataset.manifest.chat.stop_tokens, first_prompts(sources, answers)
    rate = AnswerEvaluator(prompts, stops, limit, 32, world).stop_rate(model, lambda: False)
    reader = BatchReader(0, 1, 8, torch.device("cpu"), mask_documents=True)
    evaluator = Evaluator(held_out(dataset, len(sources[0])), reader, "fp32", world)
    record = evaluator.record(model, 0, lambda: False)
    assert rate is not None
    assert record is not None
    return rate, record["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--limit", type=int, default=384, help="tokens of an answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtt-sft-") as name:
        folder = Path(name)
        make_data(folder, options.rows)
        seconds = {"base": 0.0}
        for job, train_on in (("masked", "assistant"), ("unmasked", "all")):
            keys = chat_keys(job, train_on)
            dtt("download", *keys, folder=folder)
            dtt("tokenize", *keys, folder=folder)
            start = time.perf_counter()
            more = ["init.from=jobs/base", f"train.epochs={options.epochs}"]
            dtt("train", *keys, *more, folder=folder)
            seconds[job] = time.perf_counter() - start
        paths = [f"tokenize.out={folder / 'masked'}", f"data.tokens={folder / 'masked'}"]
        dataset = open_dataset(resolve(None, [*chat_keys("masked", "assistant"), *paths]).config)
        results = {
            job: measure(folder / "jobs" / job, dataset, options.answers, options.limit)
            for job in seconds
        }
    print(
        f"{options.rows} problems of GSM8K, {options.epochs:g} epochs; {options.answers} held-out"
    )
    print(f"{'':28}{'answers that stop':>18}{'loss of answers':>17}{'training, s':>13}")
    names = {"base": "before", "masked": "answers trained", "unmasked": "all tokens trained"}
    for job, (rate, loss) in results.items():
        print(f"{names[job]:28}{rate:>18.1%}{loss:>17.4f}{seconds[job]:>13.0f}")
    if results["masked"][0] < 0.9 or results["base"][0] > 0.05:
        sys.exit("expected about 0 % before and at least 90 % after")


if __name__ == "__main__":
    main()
