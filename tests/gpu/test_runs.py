"""Steps, saves, measurements and plans on a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support.gpu_runs import WORLD
from support.guarded_runs import build, one_step
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import EnvironmentUnfit
from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.config.model import ModelConfig
from dtt.config.run import RunConfig
from dtt.config.train import CheckpointConfig
from dtt.doctor import devices
from dtt.mesh.peak_flops import measured_flops, peak_flops
from dtt.mesh.sharding import on_every_rank
from dtt.model import families
from dtt.train.process_memory import exhaustion_explained
from dtt.train.throughput import ThroughputMeter

MIXTURE = (
    "model.family=qwen3_moe", "model.n_experts=4", "model.experts_per_token=2", "model.dim=64",
    "model.expert_ffn_dim=32", "train.precision=bf16", "train.balance_loss=0.01",
    "train.router_z_loss=0.001",
)  # fmt: skip
"""A model whose experts one kernel computes."""
FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {"dtt": "1", "torch": "2"}}


def test_a_gpu_multiplies_correctly_in_both_dtypes() -> None:
    found = devices.examine(torch.device("cuda", 0))
    assert set(found.tflops) == {"float32", "bfloat16"}
    assert found.wrong == ()


def test_gpus_run_collectives_over_nccl(dtt: Dtt) -> None:
    count = str(min(2, torch.cuda.device_count()))
    done = dtt.wait(dtt.start("doctor", "--processes", count, "--json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["processes"][0]["environment"]["nccl"] != "none"
    assert len(found["exchanges"]) == (45 if count == "2" else 0)


def test_a_gpu_measures_no_more_than_its_data_sheet_says() -> None:
    device = torch.device("cuda")
    before = torch.cuda.memory_reserved()
    measured = measured_flops(device, torch.bfloat16)
    assert torch.cuda.memory_reserved() <= before  # an empty cache, whoever filled it before
    peak = peak_flops(device)
    assert peak is None or 0.3 * peak < measured < peak


def test_the_plan_of_a_gpu_is_near_what_a_step_takes(dtt: Dtt, tmp_path: Path) -> None:
    keys = (
        "-c", "models/gpt2-124m", "name=planned", "data.type=synthetic", "train.seq_len=1024",
        "train.micro_batch=8", "train.global_batch_tokens=8192", "launch.gpus_per_node=1",
        "train.steps=3", "schedule.warmup=0", "train.log_every=1",
    )  # fmt: skip
    facts = json.loads(dtt("plan", *keys, "--json").stdout)
    dtt("train", *keys)
    lines = (tmp_path / "jobs/planned/metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "perf"]
    planned_bytes = facts["memory_peak"] - facts["memory"]["framework"]
    assert planned_bytes == pytest.approx(steps[-1]["memory_steady_gb"] * 1e9, rel=0.15)


def test_time_is_the_devices() -> None:
    config = ModelConfig(dim=16, n_layers=2, n_heads=2)
    arch = families.get(config.family).architecture(config, 64, 32)
    speed = ThroughputMeter(arch, torch.bfloat16, WORLD)
    x = torch.randn(4096, 4096, device="cuda")
    with speed.step(1, 32):
        time.sleep(0.05)  # the batch is late, and the device has nothing to do
        speed.end_phase("data")
        for _ in range(50):
            x = x @ x
        speed.end_phase("forward_backward")
    torch.cuda.synchronize()
    seconds = speed.read()["seconds"]
    assert seconds["data"] > 0.04
    assert seconds["forward_backward"] > 50 * 2 * 4096**3 / 1e15


@pytest.mark.parametrize("model", [(), MIXTURE], ids=["dense", "mixture"])
def test_a_guarded_step_never_synchronises(
    tokens: Path, tmp_path: Path, model: tuple[str, ...]
) -> None:
    keys = ("guard.non_finite=skip", "guard.spike=skip", "train.compile=false")
    step = one_step(build(WORLD, tmp_path, tokens, *keys, *model))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()  # this is how a wait would fail
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_that_is_full_leaves_a_snapshot(tmp_path: Path) -> None:
    torch.empty(2**28, dtype=torch.uint8, device="cuda")  # the most that is ever held
    with (
        pytest.raises(EnvironmentUnfit, match="the GPU of rank 0") as raised,
        exhaustion_explained(RunConfig(), JobDir(tmp_path), WORLD),
    ):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert "(at most 0.00 GB were allocated)" not in str(raised.value)
    assert (tmp_path / "profiles/oom-rank-00000.pickle").stat().st_size > 0


def test_the_copy_is_made_before_training_continues(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    job.checkpoints.mkdir(parents=True)
    saver = Saver(job, 1, WORLD, CheckpointConfig(keep_last=3), FACTS)
    for step in (1, 2, 3):
        weight = torch.full((4096, 4096), float(step), device="cuda")
        saver.begin(step, on_every_rank({"w": weight}), {}, {})
        weight.fill_(99.0)
    saver.wait()
    for step in (1, 2, 3):
        held = store.at_step(tmp_path / "checkpoints", step).tensors(store.MODEL)
        assert torch.equal(held["w"], torch.full((4096, 4096), float(step)))
