from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.running import Dtt
from tokenizers import Tokenizer

from dtt.config.load import load_job
from dtt.config.model import ModelConfig
from dtt.config.train import TrainConfig
from dtt.data.samples.dataset import open_dataset
from dtt.evaluate.validation import Sampler, _opening, first_words
from dtt.model import families
from dtt.model.decoder import Decoder


def test_a_diverged_model_yields_no_sample_and_does_not_end_the_run(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = ModelConfig(dim=16, n_layers=1, n_heads=2)
    model = Decoder(families.get(cfg.family).architecture(cfg, 300, 32))
    torch.nn.init.constant_(model.get_parameter("norm.weight"), torch.nan)
    train = TrainConfig(sample_prompt="one", sample_tokens=6)
    with caplog.at_level(logging.WARNING, logger="dtt"):
        tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
        record = Sampler(train, tokenizer, [1, 2], "one", (0,), seed=0).record(model, 3)
    assert record == {
        "kind": "sample", "step": 3, "temperature": 0.8, "prompt": "one", "text": "one",
    }  # fmt: skip
    assert "no sample: the model's logits are not finite" in caplog.text


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_bits_per_byte_are_those_of_the_tokens_that_were_evaluated(
    dtt: Dtt, tiny: Callable[..., list[str]], packing: str
) -> None:
    """Their text, decoded, is counted; that of the whole held-out text differs from it."""
    options = {"train.eval_tokens": 64, "train.steps": 2, "data.packing": packing}
    dtt("train", *tiny(**options))
    job = dtt.folder / "jobs/t"
    records = map(json.loads, (job / "metrics.jsonl").read_text().splitlines())
    record = next(record for record in records if record["kind"] == "eval")
    dataset = open_dataset(load_job(job))
    (source,) = dataset.validation
    assert source is not None
    rows = source.read(np.arange(2, dtype=np.uint64)).ids[:, 1:]
    targets = rows[rows >= 0].tolist()
    tokenizer = Tokenizer.from_file(str(job / "tokenizer.json"))
    text = tokenizer.decode(targets)
    prompt = first_words([source], tokenizer, dataset.manifest.end_of_document)
    assert len(prompt) >= 6
    ids = source.read(np.arange(8, dtype=np.uint64)).ids
    assert prompt in tokenizer.decode(ids[ids >= 0].tolist())
    bits = record["loss"] * len(targets) / math.log(2)
    assert record["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-6)
    assert source.bytes_per_token is not None
    whole = bits / (len(targets) * source.bytes_per_token)
    assert abs(record["bits_per_byte"] / whole - 1) > 1e-3


OPENINGS = {
    "Once upon a time there lived a miller": "Once upon a time there",
    "  \n\n  It was late.\nThe end": "It was late.",
    '"""\nTests for heaps\n"""': "Tests for heaps",
    "#!/bin/sh\n# Copyright 2020 by the authors of it": "# Copyright 2020 by the",
    "----\nTitle of the book\n": "Title of the book",
    "Donaudampfschifffahrtsgesellschaftskapitän": "Donaudampfschifffahrtsgesellscha",
    "internationalization of characters everywhere": "internationalization of",
    'it\'s $HOME `x` "y" !z': 'it\'s $HOME `x` "y" !z',
    "今天天气很好，我们去公园散步吧。": "今天天气很好，我们去公园散步吧。",
    "tab\tseparated values": "",
    "a cut charac\ufffd": "a cut charac",
    "\x00\x01binary text\nand words": "and words",
    "\n\n": "",
    "": "",
}


@pytest.mark.parametrize("text", OPENINGS)
def test_the_prompt_of_samples_is_short_and_on_one_line(text: str) -> None:
    assert _opening(text) == OPENINGS[text]
