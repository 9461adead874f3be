"""Preference pairs of real conversations: the ids of TRL, and the loss of its DPOTrainer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.running import Dtt
from support.tiny_job import make_tokenizer

from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.data.conversations.template import CHATML
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import BatchReader
from dtt.data.samples.reference import with_reference
from dtt.data.token_file import TokenFile
from dtt.hf.read import read_hf_folder
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.model.decoder import Decoder
from dtt.train.objectives.dpo import DpoConfig
from dtt.train.objectives.loss_function import loss_function
from dtt.train.objectives.reference_pass import ReferencePass
from dtt.train.step import Passes

SEQ_LEN, PAIRS, BETA = 2048, 24, 0.1


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


def open_model(folder: Path) -> Decoder:
    trained = read_hf_folder(folder)
    model = Decoder(trained.arch)
    model.load_state_dict({name: tensor[()] for name, tensor in trained.state.items()})
    return model


@pytest.mark.slow
def test_rows_of_gsm8k_have_the_ids_and_the_loss_of_trl(shared: Path, dtt: Dtt) -> None:
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
        "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.1,
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": SEQ_LEN,
    }  # fmt: skip
    theirs: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        model.save_pretrained(dtt.folder / f"model-{seed}")
        theirs_tokenizer.save_pretrained(dtt.folder / f"model-{seed}")
        theirs.append(model)
    trainer = trl.DPOTrainer(
        model=theirs[0],
        ref_model=theirs[1],
        args=trl.DPOConfig(
            output_dir=str(dtt.folder / "trl"), beta=BETA, use_cpu=True, report_to="none",
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

    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(PAIRS)])
    for i, (a, b) in enumerate([*bounds[::2], *bounds[1::2]]):
        batch["completion_mask"][i] = 0
        batch["completion_mask"][i, : b - a] = torch.from_numpy(mask[a:b].astype(np.int64))
    theirs_loss = trainer.compute_loss(trainer.model, batch)

    cfg = resolve(
        None,
        [
            "data.type=preference", "objective.type=dpo", f"data.tokens={dtt.folder / 'tokens'}",
            f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQ_LEN}",
        ],
    ).config  # fmt: skip
    cpu, world = torch.device("cpu"), World(Ranks(0, 1, 0, 1, "none"), torch.device("cpu"), None)
    reader = BatchReader(0, 1, 2, cpu)
    dataset, folder = open_dataset(cfg), dtt.folder / "reference"
    step = Passes(open_model(dtt.folder / "model-1"), "fp32")
    reference = ReferencePass(step, reader, Mesh(), world)
    reference.write(dataset, folder, "key", SEQ_LEN)
    source = with_reference(dataset, folder).sources[0]
    samples = np.arange(len(source), dtype=np.uint64)
    pairs = source.counts(samples).terms
    assert pairs == PAIRS
    policy = open_model(dtt.folder / "model-0")
    objective = loss_function(DpoConfig(beta=BETA))
    micro_batches = reader.read(source, samples)
    assert len(micro_batches) > 1
    got = Passes(policy, "fp32").run(micro_batches, objective, pairs)

    difference = abs(got.loss.item() / theirs_loss.item() - 1)
    print(f"relative difference of the loss: {difference:.1e}")
    assert difference < 1e-5
