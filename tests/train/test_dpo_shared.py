"""Preference pairs of real conversations have the ids of TRL."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running import Dtt
from support.tiny_job import make_tokenizer

from dtt.data.conversations.template import CHATML
from dtt.data.token_file import TokenFile

SEQ_LEN, PAIRS = 2048, 24


def write_pairs(shared: Path, path: Path) -> list[dict[str, Any]]:
    """Write pairs whose rejected answer is that of the next row; return them as TRL reads them."""
    lines = (shared / "data/sft/gsm8k_train.jsonl").read_text().splitlines()[: PAIRS + 1]
    rows = [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": following["messages"][1:],
        }
        for row, following in pairwise(map(json.loads, lines))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.mark.slow
def test_rows_of_gsm8k_have_the_ids_of_trl(shared: Path, dtt: Dtt) -> None:
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    trl = pytest.importorskip("trl")
    rows = write_pairs(shared, dtt.folder / "pairs.jsonl")
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.save(str(dtt.folder / "tokenizer.json"))
    data = ["data.type=preference", "objective.type=dpo", "tokenize.out=tokens"]
    dtt("download", "-d", "pairs.jsonl", *data)
    dtt(
        "tokenize", "-d", "pairs.jsonl", *data, "tokenizer.type=file",
        "tokenizer.path=tokenizer.json", "tokenize.validation_fraction=0",
    )  # fmt: skip

    theirs_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs_tokenizer.chat_template = CHATML
    sizes: Any = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 64,
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": SEQ_LEN,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(dtt.folder / "model")
    theirs_tokenizer.save_pretrained(dtt.folder / "model")
    trainer = trl.DPOTrainer(
        model=str(dtt.folder / "model"),
        args=trl.DPOConfig(
            output_dir=str(dtt.folder / "trl"), use_cpu=True, report_to="none",
            gradient_checkpointing=False, bf16=False, max_length=SEQ_LEN,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=theirs_tokenizer,
    )  # fmt: skip

    file = TokenFile(dtt.folder / "tokens/train-00000")
    ids = np.fromfile(dtt.folder / "tokens/train-00000.bin", "<u2")
    mask = np.fromfile(dtt.folder / "tokens/train-00000.mask", np.uint8)
    bounds = [*pairwise(file.bounds().tolist())]
    prepared = [
        row["prompt_ids"] + row[side]
        for row in trainer.train_dataset
        for side in ("chosen_ids", "rejected_ids")
    ]
    assert [ids[a:b].tolist() for a, b in bounds] == prepared
    for (a, b), row in zip(bounds[::2], trainer.train_dataset, strict=True):
        # TRL also trains the line break after <|im_end|>, which no model needs to predict.
        assert mask[a:b].tolist() == (
            [0] * len(row["prompt_ids"]) + [1] * (len(row["chosen_ids"]) - 1) + [0]
        )
