"""Preference pairs of random token ids, packed into micro-batches, and tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dtt.base.targets import IGNORE_INDEX
from dtt.config.model import ModelConfig
from dtt.data.samples.loader import MicroBatch
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from support.running import Dtt
from support.tiny_job import make_tokenizer, write_chat_job, write_checkpoint

VOCAB_SIZE, SEQ_LEN = 300, 64


@dataclass(frozen=True)
class Answered:
    """A conversation: token ids, and which of them are targets."""

    ids: list[int]
    mask: list[bool]


Pair = tuple[Answered, Answered]
"""The chosen and the rejected conversation."""


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Return pairs with a common prompt of 2 … 8 ids and answers of 1 … 9 ids."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(VOCAB_SIZE, size=rng.integers(low, high)).tolist()

    pairs = []
    for _ in range(count):
        prompt = ids(2, 9)
        answers = ids(1, 10), ids(1, 10)
        chosen, rejected = (
            Answered(prompt + answer, [False] * len(prompt) + [True] * len(answer))
            for answer in answers
        )
        pairs.append((chosen, rejected))
    return pairs


def packed(pairs: Sequence[Pair]) -> MicroBatch:
    """Pack pairs in order into rows of `SEQ_LEN` inputs, without reference log-probabilities."""
    rows: list[list[Answered]] = [[]]
    for pair in pairs:
        used = sum(len(one.ids) for one in rows[-1])
        if used + sum(len(one.ids) for one in pair) > SEQ_LEN + 1:
            rows.append([])
        rows[-1].extend(pair)
    ids = np.full((len(rows), SEQ_LEN + 1), IGNORE_INDEX)
    mask = np.zeros(ids.shape, dtype=np.bool_)
    documents = np.zeros(ids.shape, dtype=np.int32)
    for row, conversations in enumerate(rows):
        place = 0
        for number, one in enumerate(conversations):
            end = place + len(one.ids)
            ids[row, place:end], mask[row, place:end] = one.ids, one.mask
            documents[row, place:] = number  # padding belongs to the last document
            place = end
    targets = np.where(mask[:, 1:], ids[:, 1:], IGNORE_INDEX)
    return MicroBatch(
        torch.from_numpy(ids[:, :-1]).clamp(min=0),
        torch.from_numpy(targets),
        torch.from_numpy(documents[:, :-1].copy()),
    )


def decoder(seed: int, family: str = "llama") -> Decoder:
    """Return a tiny model with random weights."""
    cfg = ModelConfig(family=family, dim=32, n_layers=2, n_heads=2)
    model = Decoder(families.get(family).architecture(cfg, VOCAB_SIZE, SEQ_LEN))
    initialize(model, seed)
    return model


@torch.no_grad()
def with_reference(micro_batch: MicroBatch, reference: Decoder) -> MicroBatch:
    """Return the micro-batch with the log-probabilities of `reference`."""
    losses = reference(
        micro_batch.tokens, micro_batch.targets, doc_ids_BT=micro_batch.doc_ids, reduction="none"
    )
    return replace(micro_batch, extra={"reference_logprobs": -losses.loss})


def split(micro_batch: MicroBatch, rows: int) -> list[MicroBatch]:
    """Divide a micro-batch into some of `rows` rows each."""
    assert micro_batch.doc_ids is not None
    columns: list[tuple[Tensor, ...]] = [
        column.split(rows)
        for column in (
            micro_batch.tokens,
            micro_batch.targets,
            micro_batch.doc_ids,
            micro_batch.extra["reference_logprobs"],
        )
    ]
    return [
        MicroBatch(x, y, documents, {"reference_logprobs": logprobs})
        for x, y, documents, logprobs in zip(*columns, strict=True)
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def write_rows(folder: Path) -> None:
    """Write `tokenizer.json` with chat tokens, and rows of 200 pairs, two of which are refused."""
    make_tokenizer("<|im_start|>", "<|im_end|>").save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = [{"prompt": "x", "chosen": "a"}]
    for i in range(200):
        a, b = rng.integers(50, size=2).tolist()
        question = {"role": "user", "content": f"{a}+{b}?"}
        answers = f"{a + b}.", "I do not know" + "!" * (i % 7)
        chosen, rejected = ({"role": "assistant", "content": answer} for answer in answers)
        rows.append({"chosen": [question, chosen], "rejected": [question, rejected]})
    rows.append({"prompt": "x", "chosen": "a", "rejected": "a"})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "pairs.jsonl").write_text(text)


def settings(**changes: object) -> list[str]:
    """Return the arguments of a short run on these rows; keywords change keys."""
    values: dict[str, object] = {
        "data.type": "preference", "objective.type": "dpo", "init.from": "jobs/tiny", "name": "t",
        "data.tokens": "tokens", "model.dim": 32, "model.n_layers": 2, "model.n_heads": 2,
        "optim.type": "adamw", "optim.lr": 0.003, "train.precision": "fp32", "train.seq_len": 192,
        "train.micro_batch": 2, "train.global_batch_tokens": 1536, "train.steps": 8,
        "train.log_every": 2, "train.eval_every": 4, "train.sample_tokens": 0,
        "train.eval_answers": 0, "train.device": "cpu", "checkpoint.every": 4,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def prepare(dtt: Dtt) -> None:
    """Make the token files `tokens`, and the job `jobs/tiny` with a model to start from."""
    write_rows(dtt.folder)
    data = ["data.type=preference", "objective.type=dpo"]
    dtt("download", "-d", "pairs.jsonl", *data)
    dtt(
        "tokenize", "-d", "pairs.jsonl", *data, "tokenizer.type=file",
        "tokenizer.path=tokenizer.json", "tokenize.out=tokens", "tokenize.validation_fraction=0.1",
    )  # fmt: skip
    write_checkpoint(write_chat_job(dtt.folder), 15)
