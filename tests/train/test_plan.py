"""The plan of a run: what does not fit is said before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dtt.artifacts import TokensManifest
from dtt.config.model import ModelConfig
from dtt.config.run import RunConfig
from dtt.config.train import TrainConfig
from dtt.errors import ConfigError
from dtt.model.decoder import Decoder
from dtt.runtime.dist import World
from dtt.runtime.ranks import Ranks
from dtt.train.plan import Plan, make_plan


def plan(tokens: Path, size: int = 1, windows: int = 1000, **train: Any) -> Plan:
    settings = {"seq_len": 32, "global_batch_tokens": 256, "steps": 10} | train
    model = ModelConfig(dim=16, n_layers=2, n_heads=2)
    cfg = RunConfig(model=model, train=TrainConfig(**settings))
    world = World(Ranks(0, size, 0, size, "torchrun"), torch.device("cpu"), None)
    return make_plan(cfg, TokensManifest.read(tokens), windows, world)


def test_the_numbers_follow_from_config_data_and_ranks(tokens: Path) -> None:
    made = plan(tokens, size=2)
    assert (made.sequences, made.tokens_per_step, made.steps) == (8, 256, 10)
    assert made.parameters == sum(p.numel() for p in Decoder(made.arch).parameters())
    assert made.arch.vocab_size >= TokensManifest.read(tokens).vocab_size
    assert not made.compile
    world = World(Ranks(0, 2, 0, 2, "torchrun"), torch.device("cpu"), None)
    assert "10 steps of 256 tokens: 0.0M tokens" in made.describe(world)
    assert "0.08 epochs" in made.describe(world)


@pytest.mark.parametrize(("asked", "expected"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_a_precision_that_is_asked_for_is_taken(tokens: Path, asked: str, expected: str) -> None:
    assert plan(tokens, precision=asked).precision == expected


def test_compilation_can_be_asked_for_on_a_cpu(tokens: Path) -> None:
    assert plan(tokens, compile=True).compile


def test_a_batch_that_does_not_divide_names_the_next_one_that_does(tokens: Path) -> None:
    with pytest.raises(ConfigError, match=r"8 sequences does not divide over 3") as caught:
        plan(tokens, size=3)
    remedy = re.search(r"train\.global_batch_tokens=(\d+)", str(caught.value))
    assert remedy is not None
    assert plan(tokens, size=3, global_batch_tokens=int(remedy[1])).sequences == 9


def test_data_shorter_than_a_sequence_names_a_length_that_fits(tokens: Path) -> None:
    total = TokensManifest.read(tokens).counts("train").tokens
    with pytest.raises(ConfigError, match=f"{total} tokens in all") as caught:
        plan(tokens, windows=0, seq_len=2**20, global_batch_tokens=2**20)
    remedy = re.search(r"train\.seq_len=(\d+)", str(caught.value))
    assert remedy is not None
    seq_len = int(remedy[1])
    assert total / 4 < seq_len <= total / 2
    plan(tokens, seq_len=seq_len, global_batch_tokens=2**20)


def test_data_that_is_next_to_nothing_needs_more_text(tokens: Path) -> None:
    manifest = TokensManifest.read(tokens).model_copy(update={"shards": ()})
    world = World(Ranks(), torch.device("cpu"), None)
    with pytest.raises(ConfigError, match="more text"):
        make_plan(RunConfig(), manifest, 0, world)
