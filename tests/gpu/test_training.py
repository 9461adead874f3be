"""Runs on GPUs train, evaluate, save and resume, and every layout computes what one GPU does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_runs import SIZES, WORLD, train, values
from support.guarded_runs import build, one_step
from support.running import Dtt
from support.tiny_architectures import make, tiny_architecture

from dtt.model.generate import generate_batch, make_decoding
from dtt.parallel import fp8

GPUS = torch.cuda.device_count()
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ("train.remat=full",)),
    "ddp": (2, ()),
    "fsdp2": (2, ("parallel.replicate=1", "parallel.shard=2", "optim.type=muon")),
    "tensor": (2, ("parallel.tensor=2", "train.remat=selective")),
    "context": (2, ("parallel.context=2", "data.mask_documents=true")),
}
"""Number of processes and keys. Without a GPU, one layout shows that the test itself works."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_of_any_layout_computes_what_one_device_does(
    dtt: Dtt, tokens: Path, device: str, layout: str
) -> None:
    processes, keys = LAYOUTS[layout]
    if processes > GPUS and not (GPUS == 0 and layout == "tensor"):
        pytest.skip(f"needs {processes} GPUs" if processes > 1 else "needs a GPU")
    common = (f"data.tokens={tokens}", f"train.device={device}", "train.precision=fp32", *SIZES)
    alone = [key for key in keys if not key.startswith(("parallel.", "train.remat"))]
    train(dtt, 1, *common, *alone, "name=whole", "train.compile=false", "train.steps=4")
    log = train(dtt, processes, *common, *keys, "name=parts", "train.steps=2")
    assert layout != "tensor" or not GPUS or "the compiler may overlap" in log
    log += train(dtt, processes, "jobs/parts", "train.steps=4", "--allow-change", "train.steps")
    assert "resumed from" in log
    assert "training continues uncompiled" not in log
    for kind, count in (("train", 4), ("eval", 3)):
        found = values(dtt, "parts", kind)
        assert found == pytest.approx(values(dtt, "whole", kind), rel=1e-3)
        assert len(found) == count


def test_a_resumed_adapter_computes_what_an_uncompiled_one_does(
    dtt: Dtt, tokens: Path, device: str
) -> None:
    common = (f"data.tokens={tokens}", f"train.device={device}", "train.precision=fp32", *SIZES)
    train(dtt, 1, *common, "name=base", "train.steps=2")
    lora = (
        *common, "init.from=jobs/base", "adapter.type=lora", "adapter.rank=4", "optim.type=adamw",
        "optim.lr=3e-3",
    )  # fmt: skip
    train(dtt, 1, *lora, "name=whole", "train.compile=false", "train.steps=4")
    log = train(dtt, 1, *lora, "name=parts", "train.remat=full", "train.steps=2")
    log += train(dtt, 1, "jobs/parts", "train.steps=4", "--allow-change", "train.steps")
    assert "resumed from" in log
    assert "training continues uncompiled" not in log
    found = values(dtt, "parts", "train")
    assert found == pytest.approx(values(dtt, "whole", "train"), rel=1e-3)
    assert len(found) == 4


def test_a_context_schedule_trains_on_documents(dtt: Dtt, tokens: Path, device: str) -> None:
    log = train(
        dtt, 1, f"data.tokens={tokens}", f"train.device={device}", *SIZES, "train.steps=4",
        "data.mask_documents=true", "train.context_schedule=[[0,64],[50%,128]]", "name=schedule",
    )  # fmt: skip
    assert ("FlexAttention" in log) == bool(GPUS)
    assert "training continues uncompiled" not in log
    assert all(0 < loss < 7 for loss in values(dtt, "schedule", "train"))


@torch.no_grad()
def test_generated_tokens_are_those_of_a_cpu(device: str) -> None:
    model, tokens = make(tiny_architecture("llama"))
    prompts = [row[: 3 + i].tolist() for i, row in enumerate(tokens)]
    how: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    how["generators"] = [None] * len(prompts)
    expected = list(generate_batch(model, prompts, **how))
    assert list(generate_batch(model.to(device), prompts, **how)) == expected


@torch.no_grad()
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.9}])
def test_a_cuda_graph_of_a_step_gives_the_tokens_of_the_step(
    device: str, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = make(tiny_architecture("llama"))[0].to(device)
    answers = []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr("dtt.model.decoding.StepGraphs.run", lambda _, __, step: step())
        state = make_decoding(model)
        for prompts in ([[5, 17, 3]], [[5, 17, 3], [41], [9] * 9, [7, 2]]):
            own = [torch.Generator(device).manual_seed(i) for i in range(len(prompts))]
            how: dict[str, Any] = {"max_new_tokens": 10, "decoding": state, **sampling}
            answers.append(list(generate_batch(model, prompts, generators=own, **how)))
    assert answers[:2] == answers[2:]
    assert "CUDA graph" not in caplog.text


def test_a_step_in_fp8_is_near_that_in_bf16(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small products gain nothing; these are to run in any case.
    monkeypatch.setattr(fp8, "find_gains", lambda layers, _: dict.fromkeys(layers.values(), 2.0))
    losses = []
    for precision in ("bf16", "fp8"):
        (tmp_path / precision).mkdir()
        trainer = build(
            WORLD, tmp_path / precision, tokens, "model.dim=128", f"train.precision={precision}"
        )
        one_step(trainer)()
        losses.append(float(trainer._unread[-1][1][0]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_layouts_are_verified_on_gpus(dtt: Dtt) -> None:
    found = json.loads(
        dtt("verify", "--device", "cuda", "--json", "data.mask_documents=true").stdout
    )
    assert found[0]["layouts"], found
