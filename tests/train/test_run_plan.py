"""The plan of a run: settings that do not fit are refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError
from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset
from dtt.mesh.dist import World
from dtt.model.decoder import Decoder
from dtt.train.run_plan import RunPlan, make_plan


def plan(tokens: Path, *arguments: str, size: int = 1, **train: Any) -> RunPlan:
    settings = {"seq_len": 32, "global_batch_tokens": 256, "steps": 10} | train
    cfg = resolve(
        None,
        [
            f"data.tokens={tokens}", "model.dim=16", "model.n_layers=2", "model.n_heads=2",
            *(f"train.{key}={value}" for key, value in settings.items()), *arguments,
        ],
    ).config  # fmt: skip
    world = World(Ranks(0, size, 0, size, "torchrun"), torch.device("cpu"), None)
    return make_plan(cfg, open_dataset(cfg), world)


def test_the_numbers_follow_from_config_data_and_ranks(tokens: Path) -> None:
    run_plan = plan(tokens, size=2)
    assert (run_plan.tokens, run_plan.step_size, run_plan.steps) == (2560, "256 tokens", 10)
    assert run_plan.parameters == sum(p.numel() for p in Decoder(run_plan.arch).parameters())
    assert run_plan.arch.vocab_size >= TokensManifest.read(tokens).vocab_size
    assert not run_plan.compile
    world = World(Ranks(0, 2, 0, 2, "torchrun"), torch.device("cpu"), None)
    assert "10 steps of 256 tokens: 0.0M tokens" in run_plan.describe(world)
    assert "learning rate: decay (1-sqrt) from step 9, 29.3% of the peak in step 10\n" in (
        run_plan.describe(world)
    )
    windows = (TokensManifest.read(tokens).counts("train").tokens - 1) // 32
    assert f"{80 / windows:.2f} epochs" in run_plan.describe(world)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.mask_documents=false"], "attention: SDPA (flash)\n"),
        (["data.mask_documents=true"], "block-sparse SDPA within documents\n"),
        (
            ["train.batch_schedule={type: doubling, start: 64, every: 3}",
             "train.context_schedule=[[0, 16], [50%, 32]]"],
            "10 steps of 64 to 256 tokens in contexts of 16 to 32: 0.0M tokens",
        ),
        (["train.precision=fp32"], "fp32 on 1 x cpu\n"),
        (["train.precision=bf16"], "bf16 on 1 x cpu\n"),
        (["train.compile=true"], ", compiled\n"),
    ],
)  # fmt: skip
def test_the_plan_describes_the_run(tokens: Path, arguments: list[str], said: str) -> None:
    world = World(Ranks(0, 1, 0, 1, "torchrun"), torch.device("cpu"), None)
    run_plan = plan(tokens, *arguments)
    assert said in run_plan.describe(world)
    assert run_plan.tokens == (3 * 64 + 3 * 128 + 4 * 256 if "64 to 256" in said else 2560)


def test_a_batch_that_does_not_divide_names_the_next_one_that_does(tokens: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"8 sequences cannot be divided evenly among 3"
    ) as caught:
        plan(tokens, size=3)
    remedy = re.search(r"train\.global_batch_tokens=(\d+)", str(caught.value))
    assert remedy is not None
    assert plan(tokens, size=3, global_batch_tokens=int(remedy[1])).step_size == "288 tokens"


def test_data_shorter_than_a_sequence_names_a_length_that_fits(tokens: Path) -> None:
    total = TokensManifest.read(tokens).counts("train").tokens
    with pytest.raises(ConfigError, match=f"{total} tokens in total") as caught:
        plan(tokens, seq_len=2**20, global_batch_tokens=2**20)
    remedy = re.search(r"train\.seq_len=(\d+)", str(caught.value))
    assert remedy is not None
    seq_len = int(remedy[1])
    assert total / 4 < seq_len <= total / 2
    plan(tokens, seq_len=seq_len, global_batch_tokens=2**20)


def test_a_run_that_may_not_repeat_its_data_ends_with_it(tokens: Path) -> None:
    windows = (TokensManifest.read(tokens).counts("train").tokens - 1) // 32
    assert plan(tokens, "data.on_exhausted=stop", steps=10**6).steps == windows // 8
    assert plan(tokens, "data.on_exhausted=stop", steps=3).steps == 3
    with pytest.raises(ConfigError, match="exhausted before the end of the first step"):
        plan(tokens, "data.on_exhausted=stop", global_batch_tokens=32 * (windows + 1))
