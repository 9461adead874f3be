"""Packed batches have the loss and the gradients that TRL computes for the rows without packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.running import Dtt
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import BatchReader
from dtt.hf.read import read_hf_folder
from dtt.hf.weights import from_hf
from dtt.model.decoder import Decoder
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import Passes

ROWS, SEQ_LEN = 48, 640
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with TRL's marks of trained text, of which dtt trains the same."""


@pytest.fixture(scope="module")
def folder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of GSM8K, their token files and an exported base model."""
    folder = tmp_path_factory.mktemp("trl")
    lines = (shared / "data/sft/gsm8k_train.jsonl").read_text().splitlines()[:ROWS]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    texts = (" ".join(m["content"] for m in json.loads(line)["messages"]) for line in lines)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "template.jinja").write_text(TEMPLATE)
    dtt = Dtt(folder)
    dtt(
        "pipeline", "name=base", "download.dataset=text.jsonl", "tokenizer.vocab_size=500",
        "tokenizer.chat_tokens=true", "tokenize.out=base-tokens", "model.dim=32",
        "model.n_layers=2", "model.n_heads=4", f"train.seq_len={SEQ_LEN}", "train.steps=4",
        f"train.global_batch_tokens={2 * SEQ_LEN}", "schedule.warmup=1", "optim.lr=1e-2",
        "train.micro_batch=2", "train.sample_tokens=0", "tokenize.validation_fraction=0",
        "pipeline.tokenize_processes=1",
    )  # fmt: skip
    dtt("download", *chat_settings())
    dtt("tokenize", *chat_settings())
    return folder


def chat_settings() -> list[str]:
    return [
        "data.type=chat", "download.dataset=rows.jsonl", "download.out=rows",
        "tokenizer.type=file", "tokenizer.path=base-tokens/tokenizer.json", "tokenize.out=tokens",
        "chat.template=template.jinja", "tokenize.validation_fraction=0",
        f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQ_LEN}", "train.epochs=1",
    ]  # fmt: skip


def of_trl(folder: Path) -> tuple[torch.nn.Module, float, list[tuple[list[int], list[int]]]]:
    """Return TRL's model with gradients, the loss, and the ids and labels of each row."""
    export = folder / "exports/base"
    tokenizer = AutoTokenizer.from_pretrained(export)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|endoftext|>"
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()
    ]
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), assistant_only_loss=True, max_length=None,
        use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    (batch,) = list(trainer.get_train_dataloader())
    targets = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    model.eval()  # without dropout
    loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(targets))
    loss.backward()
    found = []
    for ids, labels, real in zip(
        batch["input_ids"].tolist(),
        batch["labels"].tolist(),
        batch["attention_mask"].sum(1).tolist(),
        strict=True,
    ):
        found.append((ids[:real], labels[1:real]))
    return model, loss.item(), found


@pytest.mark.slow
def test_loss_and_gradients_of_packed_rows_are_those_of_trl(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    theirs, expected_loss, expected_rows = of_trl(folder)
    dataset = open_dataset(resolve(None, chat_settings()).config)
    (source,) = dataset.sources
    samples = np.arange(len(source), dtype=np.uint64)
    rows = source.read(samples)
    assert rows.doc_ids is not None
    masks = rows.targets != IGNORE_INDEX
    found = []
    for ids, mask, documents in zip(rows.ids, masks, rows.doc_ids, strict=True):
        for number in np.unique(documents[ids >= 0]):
            where = np.flatnonzero((documents == number) & (ids >= 0))
            labels = np.where(mask[where[:-1]], ids[where[1:]], IGNORE_INDEX)
            found.append((ids[where].tolist(), labels.tolist()))
    assert sorted(found) == sorted(expected_rows)
    assert len(samples) <= ROWS // 2  # they are packed

    trained = read_hf_folder(folder / "exports/base")
    model = Decoder(trained.arch)
    model.load_state_dict(dict(trained.state))
    reader = BatchReader(0, 1, 4, torch.device("cpu"))
    terms = dataset.counts(samples).targets
    losses = Passes(model, "fp32").run(reader.read(dataset, samples), loss_function(), terms)
    assert losses.loss.item() == pytest.approx(expected_loss, rel=1e-5)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, gradient in from_hf(gradients, trained.arch).items():
        actual = model.get_parameter(name).grad
        assert actual is not None
        assert (actual - gradient).norm() <= 1e-4 * gradient.norm(), name
