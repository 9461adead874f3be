"""A run resumes bit for bit on every layout: pytest runs it only when it is named:
`./env.sh pytest -n 0 -s tests/train/nightly_resume.py`. CI has three of them in `test_resume.py`.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from support import resumed
from support.forked_runs import run
from support.running import Dtt

from dtt.checkpoint import store

LAYOUTS = (
    *(f"replicate={n}" for n in (1, 2, 3, 5, 6)), *(f"shard={n}" for n in (2, 3, 5, 6)),
    "replicate=2 shard=2", "replicate=2 shard=3", "replicate=3 shard=2", "context=3", "tensor=3",
    "shard=3 tensor=2", "replicate=3 pipeline=2", "pipeline=2 shard=3",
)  # fmt: skip
OPTIMIZERS = {"muon": (), "adamw": ("optim.type=adamw", "optim.lr=1e-3")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_changes_no_bit(layout: str, optimizer: str, dtt: Dtt) -> None:
    more = (resumed.FOR_MORE_RANKS, *OPTIMIZERS[optimizer])
    assert resumed.differing(dtt, layout, *more) == []


@pytest.mark.parametrize("layout", ["replicate=3", "shard=3", "replicate=3 shard=2"])
def test_a_restart_changes_no_bit_of_a_mixture(layout: str, dtt: Dtt) -> None:
    mixture = (
        "model.family=dots1", "model.n_experts=4", "model.experts_per_token=2",
        "model.expert_ffn_dim=16", "model.n_dense_layers=1", "model.dropout=0",
    )  # fmt: skip
    assert resumed.differing(dtt, layout, resumed.FOR_MORE_RANKS, *mixture) == []


@pytest.mark.parametrize("layout", ["replicate=3", "replicate=5"])
def test_a_branch_and_a_warm_start_repeat_bit_for_bit(layout: str, dtt: Dtt) -> None:
    """A branch without changes is its parent; two starts from the same weights are equal."""
    ranks = int(layout[-1])
    settings = [*resumed.SETTINGS, resumed.FOR_MORE_RANKS, f"parallel.{layout}"]
    run(dtt, "train", *settings, ranks=ranks)
    run(dtt, "train", "--branch", "jobs/t@2", "name=branch", "train.steps=4", ranks=ranks)
    assert_equal(dtt, "t", "branch")
    start = [*settings, "init.from=jobs/t", "init.optimizer=carry"]
    run(dtt, "train", *start, "name=whole", ranks=ranks)
    run(dtt, "train", *start, "name=stopped", ranks=ranks)
    shutil.rmtree(dtt.folder / "jobs/stopped/checkpoints/step-000004")
    run(dtt, "train", "jobs/stopped", ranks=ranks)
    assert_equal(dtt, "whole", "stopped")


def assert_equal(dtt: Dtt, one: str, other: str) -> None:
    """The last checkpoints of two jobs have the same tensors."""
    for kind in (store.MODEL, store.STATE):
        a, b = (store.find(str(dtt.folder / "jobs" / job)).tensors(kind) for job in (one, other))
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
