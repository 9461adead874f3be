"""Ranks of NCCL on one GPU compute what one process does, and end and resume as Gloo's do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.gpu_runs import SIZES, train, values
from support.running import Dtt, wait_until

from dtt.base.local import torchrun_argv
from dtt.config.parallel import Sizes

LLAMA = ("model.family=llama", "model.tie_embeddings=false")
EXPERTS = (  # with a shared one, which computes while rows travel
    "model.family=dots1", "model.n_experts=8", "model.n_expert_groups=4",
    "model.expert_groups_per_token=2",
)  # fmt: skip
DOCUMENTS = "data.mask_documents=true"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": ("replicate=2",),
    "fsdp2": ("shard=2",),
    "tensor": ("tensor=2",),
    "context": ("context=2", DOCUMENTS),
    "pipeline": ("pipeline=2", *LLAMA),
    "expert": ("shard=2", "expert=2", *EXPERTS),
}
LARGER: dict[str, tuple[str, ...]] = {
    "hsdp": ("replicate=2", "shard=2"),
    "fsdp2 and tensor": ("shard=2", "tensor=2", "optim.type=muon", "train.remat=full"),
    "fsdp2 and context": ("shard=2", "context=2", DOCUMENTS),
    "tensor and context": ("tensor=2", "context=2", DOCUMENTS),
    "fsdp2 and pipeline": (
        "shard=2", "pipeline=2", "stages_per_rank=2", "model.n_layers=4", *LLAMA,
    ),
    "tensor and expert": ("shard=2", "tensor=2", "expert=2", *EXPERTS),
    "fsdp2, tensor, pipeline": ("shard=2", "tensor=2", "pipeline=2", *LLAMA),
    "fsdp2, context, tensor": ("shard=2", "context=2", "tensor=2", DOCUMENTS),
}  # fmt: skip
"""Keys by layout, of two ranks, which run before all else, and of four and eight; those without a
section are of `parallel`. `dtt verify` also compares each layout without one of its dimensions, and
resumes in it, from it and to it."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_have_the_right_values(dtt: Dtt, device: str, ranks: int) -> None:
    if device == "cpu" and ranks > 2:
        pytest.skip("needs a GPU: two ranks show that the test works")
    done = dtt.wait(
        dtt.start_python(*torchrun_argv(ranks, ["doctor", "--device", device, "--json"])[1:])
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["exchanges"]) >= 45, done.stderr
    assert not [problem for problem in found["problems"] if "wrong" in problem]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_process_does(dtt: Dtt, device: str, layout: str) -> None:
    assert_verified(dtt, device, LAYOUTS[layout])


def assert_verified(dtt: Dtt, device: str, layout: tuple[str, ...]) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: tests/verify compares layouts on a CPU")
    keys = [key if "." in key else f"parallel.{key}" for key in layout]
    keys = ["parallel.replicate=1", "train.precision=fp32", *keys]
    done = dtt.wait(dtt.start("verify", "--device", device, "--json", *keys))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    dims = [key for key in layout if key.split("=")[0] in Sizes._fields]
    assert found["layouts"][-1]["ranks"] == 2 ** len(dims)


IN_FP8 = '''
import dtt
from dtt.parallel import fp8

# Small products gain nothing; these are to run in any case.
fp8.find_gains = lambda layers, seconds: dict.fromkeys(layers.values(), 2.0)

class InFp8(dtt.Objective):
    """Cross-entropy."""

    def loss(self, out, batch):
        return out.sum()
'''


@pytest.mark.parametrize("layout", ["tensor", "shard"])
def test_fp8_on_two_ranks_trains_as_on_one(
    dtt: Dtt, tokens: Path, device: str, layout: str
) -> None:
    (dtt.folder / "in_fp8.py").write_text(IN_FP8)
    keys = [f"data.tokens={tokens}", f"train.device={device}", *SIZES, "train.steps=4"]
    keys += ["objective.type=in_fp8.py:InFp8", "parallel.replicate=1"]
    log = train(dtt, 1, *keys, "name=one", "train.precision=fp8")
    log += train(dtt, 2, *keys, "name=two", "train.precision=fp8", f"parallel.{layout}=2")
    train(dtt, 1, *keys, "name=bf16", "train.precision=bf16")
    assert log.count("fp8: ") == 2, log
    assert "training continues uncompiled" not in log
    one, two, bf16 = (values(dtt, name, "train") for name in ("one", "two", "bf16"))
    assert two == pytest.approx(one, rel=0.01)
    assert one == pytest.approx(bf16, rel=0.02)
    assert one != bf16


def started(dtt: Dtt, tokens: Path, device: str, *keys: str) -> subprocess.Popen[str]:
    """Start a long run of two ranks that share the weights; return once it has a checkpoint."""
    settings = [
        f"data.tokens={tokens}", f"train.device={device}", "parallel.replicate=1",
        "parallel.shard=2", *SIZES, "name=run", "checkpoint.every=5", *keys,
    ]  # fmt: skip
    process = dtt.start_python(*torchrun_argv(2, ["train", *settings, "train.steps=100000"])[1:])
    wait_until(lambda: [*(dtt.folder / "jobs/run/checkpoints").glob("step-*")], process)
    return process


def ended(dtt: Dtt, process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal to rank 1, and return what the processes said until all of them had ended."""
    place = json.loads((dtt.folder / "jobs/run/attempts/1/ranks/00001.json").read_bytes())
    os.kill(place["pid"], number)
    record = dtt.folder / "jobs/run/attempts/1/attempt.json"
    if number is signal.SIGSTOP:  # torchrun waits for it
        wait_until(lambda: record.exists() and "reason" in json.loads(record.read_bytes()))
        os.kill(place["pid"], signal.SIGKILL)
    return dtt.wait(process).stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_lost_rank_the_run_ends_and_resumes_alone(
    dtt: Dtt, tokens: Path, device: str, number: signal.Signals
) -> None:
    if device == "cpu" and number is signal.SIGSTOP:
        pytest.skip("needs a GPU: tests/train/supervise stops a rank on a CPU")
    process = started(dtt, tokens, device, "train.hang_seconds=10")
    said = ended(dtt, process, number)
    assert "rank 1" in said, said
    assert "this is a bug" not in said
    steps = len(values(dtt, "run", "train"))
    log = train(
        dtt, 1, "jobs/run", "parallel.shard=1", f"train.steps={steps + 2}",
        "--allow-change", "train.steps",
    )  # fmt: skip
    assert "resumed from" in log


def test_memory_that_runs_out_on_all_ranks_is_named(dtt: Dtt, tokens: Path, device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: the memory of a CPU is the machine's")
    keys = [
        f"data.tokens={tokens}", f"train.device={device}", *SIZES, "name=huge", "train.steps=2",
        "parallel.replicate=1", "parallel.shard=2", "model.dim=16384", "model.n_layers=64",
    ]  # fmt: skip
    done = dtt.wait(dtt.start_python(*torchrun_argv(2, ["train", *keys])[1:]))
    assert done.returncode != 0
    assert "memory" in done.stderr, done.stderr
    assert "this is a bug" not in done.stderr


GREEDY = '''
import os

import torch
import dtt

class Greedy(dtt.Objective):
    """Cross-entropy; with a file in the folder, rank 1 asks for more memory than there is."""

    def loss(self, out, batch):
        if os.environ.get("RANK") == "1" and os.path.exists("{go}"):
            torch.empty(2**46, device=out.device)
        return out.sum()
'''


def test_memory_that_runs_out_on_one_rank_ends_all_and_the_run_resumes(
    dtt: Dtt, tokens: Path, device: str
) -> None:
    go = dtt.folder / "go"
    (dtt.folder / "greedy.py").write_text(GREEDY.format(go=go))
    own = "objective.type=greedy.py:Greedy"
    process = started(dtt, tokens, device, own, "train.hang_seconds=30")
    go.touch()
    said = dtt.wait(process).stderr
    assert "memory" in said, said
    assert "rank 1" in said, said
    assert "this is a bug" not in said
    go.unlink()
    steps = len(values(dtt, "run", "train"))
    log = train(
        dtt, 1, "jobs/run", "parallel.shard=1", f"train.steps={steps + 2}",
        "--allow-change", "train.steps",
    )  # fmt: skip
    assert "resumed from" in log


@pytest.mark.parametrize("layout", LARGER)
def test_a_larger_layout_computes_what_one_process_does(dtt: Dtt, device: str, layout: str) -> None:
    assert_verified(dtt, device, LARGER[layout])
