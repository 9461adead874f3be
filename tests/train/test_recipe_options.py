"""Options of recipes in runs: resumed bit for bit, the same on several ranks, changed with care."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.running import Dtt

from dtt.checkpoint import store
from dtt.config.base import Length
from dtt.config.load import load_job, resolve
from dtt.config.shipped import shipped_configs
from dtt.track import jsonl

Settings = Callable[..., list[str]]

PRETRAIN = sorted(
    path.stem
    for path in (shipped_configs() / "pretrain").glob("*.yaml")
    if not path.stem.startswith("llama3-")  # these shard over at least eight processes
)
FP32 = {"train__precision": "fp32", "checkpoint__keep_last": 9, "optim__lr": 2e-2}
OPTIONS = {
    "cautious adamw": [
        "optim.type=adamw",
        "optim.weight_decay={value: 0.1, horizon: true, cautious: true}",
    ],
    "normuon": ["optim.normuon_beta2=0.9"],
    "own rate by role": ["optim.groups=[{match: embed, lr: 3e-2}]"],
    "muon by horizon": ["optim.weight_decay={value: 0.2, horizon: true}"],
}
WITHOUT = {
    "cautious adamw": ["optim.weight_decay={value: 0.1, horizon: true}"],
}
"""What stands in place of the last setting of an option in a run without it; nothing for others."""


def losses(job: Path) -> list[float]:
    records = jsonl.read(job / "metrics.jsonl")
    numbers = [(r["loss"], r.get("ema_loss")) for r in records if r["kind"] in ("train", "eval")]
    return [loss for pair in numbers for loss in pair if loss is not None]


def assert_same_state(one: Path, other: Path) -> None:
    """The last checkpoints of two jobs are equal bit for bit."""
    newest = [store.find(str(job)).path for job in (one, other)]
    for file in (store.rank_file(kind, 0) for kind in (store.MODEL, store.STATE)):
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes(), file


@pytest.mark.slow(except_for=["muon by horizon"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_resumed_run_equals_an_uninterrupted_one(option: str, dtt: Dtt, tiny: Settings) -> None:
    settings = [*tiny(**FP32), *OPTIONS[option]]
    dtt("train", *settings)
    job, resumed = dtt.folder / "jobs/t", dtt.folder / "jobs/resumed"
    shutil.copytree(job, resumed)
    dtt("train", resumed, "--from-step", 4)
    assert_same_state(job, resumed)
    plain = [*tiny(**FP32, name="plain"), *OPTIONS[option][:-1], *WITHOUT.get(option, [])]
    dtt("train", *plain)
    assert losses(dtt.folder / "jobs/plain") != losses(job), "the option has no effect"


@pytest.mark.slow
def test_a_horizon_trains_as_its_number_does_and_follows_the_length_of_the_run(
    dtt: Dtt, tiny: Settings
) -> None:
    """1 / (0.25 * 0.02 * 12 steps) = 16.67; with 24 steps it is half of that."""
    settings = tiny(optim__lr=2e-2, schedule__type="constant")
    done = dtt("train", *settings, "optim.weight_decay={value: 0.25, horizon: true}")
    assert "16.67" in next(line for line in done.stderr.splitlines() if "matrix" in line)
    dtt("train", *settings, f"optim.weight_decay={1 / (0.25 * 2e-2 * 12)}", "name=number")
    job = dtt.folder / "jobs/t"
    assert_same_state(job, dtt.folder / "jobs/number")
    refused = dtt("train", job, "train.steps=24", expect=2).stderr
    assert "--allow-change train.steps" in refused
    longer = dtt("train", job, "train.steps=24", "--allow-change", "train.steps").stderr
    assert "8.333" in next(line for line in longer.splitlines() if "matrix" in line)


@pytest.mark.slow
def test_a_branch_of_another_length_would_have_decayed_otherwise_and_is_refused(
    dtt: Dtt, tiny: Settings
) -> None:
    settings = tiny(schedule__type="wsd", schedule__decay=2)
    dtt("train", *settings, "optim.weight_decay={value: 0.25, horizon: true}")
    refused = dtt("train", "--branch", "jobs/t@8", "train.steps=20", expect=2).stderr
    assert "train.steps=20 changes the weight decay before the branch point" in refused
    assert "set train.steps=12" in refused
    dtt("train", "--branch", "jobs/t@8", "train.steps=12", "schedule.decay=3", "name=b")


@pytest.mark.slow(except_for=["gpt2-124m"])
@pytest.mark.parametrize("name", PRETRAIN)
def test_a_shipped_pretraining_recipe_trains_a_tiny_model(
    name: str, dtt: Dtt, tiny: Settings
) -> None:
    sizes = ["head_dim=8", "n_kv_heads=2", "ffn_dim=32", "vocab_size=320", "max_seq_len=32"]
    changed = [*tiny(train__eval_tokens=2048), *(f"model.{size}" for size in sizes)]
    dtt("train", "-c", f"pretrain/{name}", *changed, "train.sample_prompt=one")
    job = dtt.folder / "jobs/t"
    shipped, trained = resolve(f"pretrain/{name}", env={}).config, load_job(job)
    assert trained.optim == shipped.optim
    assert trained.train.z_loss == shipped.train.z_loss
    assert trained.schedule == shipped.schedule.model_copy(update={"warmup": Length(2)})
    evals = [r["loss"] for r in jsonl.read(job / "metrics.jsonl") if r["kind"] == "eval"]
    assert evals[-1] < evals[0]
