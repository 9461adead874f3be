from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_runs
from support.running import Dtt
from support.tiny_architectures import make, tiny_architecture

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.mesh.mesh import Mesh
from dtt.train.expert_load import ExpertLoad, described

TINY = [
    "data.tokens=tokens", "model.family=dots1", "model.dim=32", "model.n_layers=2",
    "model.n_heads=2", "model.n_experts=4", "model.n_dense_layers=1", "train.steps=4",
    "train.seq_len=32", "train.global_batch_tokens=512", "train.precision=fp32",
    "train.device=cpu", "train.eval_every=4", "train.eval_tokens=128", "train.sample_tokens=0",
    "train.balance_rate=0.01",
]  # fmt: skip


def test_the_correction_follows_the_load_unless_the_step_is_skipped() -> None:
    model, _ = make(tiny_architecture("dots1"))
    experts = ExpertLoad(model, Mesh(), rate=0.5)
    balance = model.layers[1].mlp.router.balance
    load = experts.total({1: torch.tensor([5, 1, 3, 3, 3, 3, 3, 3])}, torch.device("cpu"))
    experts.follow(load, torch.tensor(1.0))
    assert balance.tolist() == [0.0] * 8
    experts.follow(load, torch.tensor(0.0))
    assert balance.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_the_numbers_of_a_load() -> None:
    even, one = torch.tensor([3, 3, 3, 3]), torch.tensor([12, 0, 0, 0])
    violation, entropy, idle = described(torch.stack([even, one])).tolist()
    assert violation == [0.0, 3.0]
    assert entropy == pytest.approx([1.0, 0.0])
    assert idle == [0.0, 0.75]


def trained(dtt: Dtt, name: str, *keys: str, ranks: int = 1) -> tuple[list[dict[str, Any]], Any]:
    """The records of steps and evaluations of a run, and the last correction."""
    forked_runs.run(dtt, "train", f"name={name}", *TINY, *keys, ranks=ranks)
    job = dtt.folder / "jobs" / name
    lines = map(json.loads, (job / "metrics.jsonl").read_text().splitlines())
    kinds = [line for line in lines if line["kind"] in ("train", "eval")]
    saved = store.at_step(JobDir(job).checkpoints, 4).tensors(store.MODEL)
    return kinds, saved["layers.1.mlp.router.balance"]


@pytest.mark.slow
def test_load_and_correction_depend_on_no_layout_and_on_no_remat(dtt: Dtt, tokens: Path) -> None:
    (dtt.folder / "tokens").symlink_to(tokens)
    records, last = trained(dtt, "whole", "train.micro_batch=16")
    assert last.any()
    steps = [record for record in records if record["kind"] == "train"]
    for step in steps:
        assert step["expert_violation"].keys() == {"1"}
        assert step["balance_loss"] > 0
    [share] = records[-1]["expert_load"].values()
    assert sum(share) == pytest.approx(1.0, abs=1e-4)
    ways = {
        "parts": (("train.micro_batch=2", "train.remat=full"), 1),
        "ddp": (("train.micro_batch=2", "parallel.replicate=2"), 2),
        "shared": (
            (
                "train.micro_batch=4",
                "parallel.replicate=1",
                "parallel.shard=2",
                "parallel.expert=2",
            ),
            2,
        ),
    }
    for name, (keys, ranks) in ways.items():
        others, theirs = trained(dtt, name, *keys, ranks=ranks)
        assert torch.equal(theirs, last), name
        for mine, other in zip(records, others, strict=True):
            assert mine.get("expert_violation") == other.get("expert_violation"), name
            assert mine.get("expert_load") == other.get("expert_load"), name
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5), name


def test_the_load_of_the_last_step_survives_a_restart() -> None:
    """An evaluation that a restart repeats has the record of an undisturbed run."""
    model, _ = make(tiny_architecture("dots1"))
    before, after = ExpertLoad(model, Mesh(), rate=0.0), ExpertLoad(model, Mesh(), rate=0.0)
    assert before.tensors() == {}
    before.total({1: torch.tensor([5, 1, 3, 3, 3, 3, 3, 3])}, torch.device("cpu"))
    after.load(before.tensors())
    assert after.record() == before.record() != {}
    after.load({})
    assert after.record() == {}
