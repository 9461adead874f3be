"""`dtt train` refuses for want of memory only what `dtt plan` predicts not to fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtt.config.load import resolve
from dtt.estimate import gpus, memory
from dtt.estimate.case import make_case
from dtt.train.objectives.next_token import NextTokenConfig
from dtt.train.process_memory import least_memory

SMALL_BATCHES = (  # weights are most of what is held
    "model.dim=1024", "model.n_layers=8", "model.n_heads=4", "model.vocab_size=64",
    "train.seq_len=16", "train.micro_batch=1", "train.global_batch_tokens=64",
)  # fmt: skip
LORA = ("optim.type=adamw", "adapter={type: lora, rank: 2}", "init.from=jobs/base")
OWN = """
import torch

import dtt


class Plain(dtt.Optimizer):
    def build(self, params, run):
        return torch.optim.SGD([param.tensor for param in params.values()], lr=self.lr)


class Taught(dtt.Objective):
    def models(self):
        return [__file__.replace("plain.py", "teacher")]
"""
TEACHER = {
    "model_type": "gpt2", "n_embd": 512, "n_layer": 16, "n_head": 8, "n_positions": 32,
    "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("gpu", "keys"),
    [
        (1, ()),
        (1, ("optim.type=muon",)),
        (1, ("optim.type=adamw", "train.precision=bf16-pure")),
        (1, ("optim.type={folder}/plain.py:Plain",)),
        (1, LORA),
        (1, ("optim.type=adamw", "optim.state=8bit")),
        (1, ("optim.type=muon", "optim.adamw.state=8bit", "model.tie_embeddings=false")),
        (1, ("optim.type=muon", "model.tie_embeddings=true", "train.ema_decay=0.99")),
        (4, ("parallel.shard=4",)),
        (4, ("parallel.replicate=2", "parallel.tensor=2")),
        (4, ("parallel.pipeline=4", "optim.type=muon")),
        (4, ("parallel.shard=2", "parallel.context=2")),
        (4, ("parallel.shard=4", "optim.type={folder}/plain.py:Plain")),
        (4, ("parallel.shard=4", *LORA)),
        (1, ("objective.type={folder}/plain.py:Taught",)),
        (4, ("parallel.shard=2", "parallel.context=2", "objective.type={folder}/plain.py:Taught")),
    ],
)
def test_what_a_run_holds_at_least_is_never_more_than_the_plan(
    tmp_path: Path, gpu: int, keys: tuple[str, ...], precision: str
) -> None:
    (tmp_path / "plain.py").write_text(OWN)
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(TEACHER))
    keys = tuple(key.format(folder=tmp_path) for key in keys) if "{folder}" in str(keys) else keys
    cfg = resolve(None, [*SMALL_BATCHES, f"train.precision={precision}", *keys], env={}).config
    case = make_case(cfg, gpus.find("H100", gpu), 1, gpu, 64, cfg.train.steps)
    planned = memory.memory(case)
    least = least_memory(cfg, case.arch, case.sizes, case.precision)
    assert 0 < least <= planned.total - planned.parts["framework"]
    if "Taught" in str(keys):
        plain = cfg.model_copy(update={"objective": NextTokenConfig()})
        held = least - least_memory(plain, case.arch, case.sizes, case.precision)
        assert 0 < held <= planned.parts["models of the objective"] < 1.01 * held


@pytest.mark.parametrize(
    ("keys", "each"),
    [
        ([], True),
        (["parallel.tensor=2"], False),
        (["parallel.reduce=last"], False),
        (["model.n_layers=4"], False),
        (["model.n_layers=4", "parallel.reduce=each"], True),
    ],
)
def test_gradients_of_8b_are_reduced_each_time_unless_whole_ones_fit(
    keys: list[str], each: bool
) -> None:
    keys = ["parallel.shard=8", "parallel.replicate=1", "train.global_batch_tokens=131072", *keys]
    cfg = resolve("models/llama3-8b", keys, env={}).config
    devices = 16 if "parallel.tensor=2" in keys else 8
    case = make_case(cfg, gpus.find("H100", 8), devices // 8, 8, 128_256, cfg.train.steps)
    assert case.reduces_each is each
