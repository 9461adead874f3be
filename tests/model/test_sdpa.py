"""SDPA takes the kernel that was asked for, and the log names the one that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.running import Dtt
from support.sdpa_kernels import arch, heads, kernels_run
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from dtt.config.train import AttentionKernel
from dtt.model import attention_backend, sdpa

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MATH = (SDPBackend.MATH,)


@pytest.mark.parametrize("asked", ["auto", "flash", "math"])
def test_the_kernel_that_is_named_is_the_one_that_runs(asked: AttentionKernel) -> None:
    named = sdpa.running_kernel(arch(), CPU, 64, asked, torch.float32)
    assert kernels_run(CPU, torch.float32, asked) == {named}
    assert asked in ("auto", named)


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_a_kernel_that_does_not_serve_here_is_refused_before_training(
    dtt: Dtt, tiny: Any, asked: str
) -> None:
    run = dtt("train", *tiny(train__attention=asked), expect=78)
    assert f"train.attention={asked} cannot compute attention here" in run.stderr
    assert "train.attention=auto" in run.stderr


def test_the_start_of_a_run_names_the_kernel(dtt: Dtt, tiny: Any) -> None:
    run = dtt("train", *tiny(train__attention="math", train__steps=1, schedule__warmup=0))
    assert "attention: SDPA (math)" in run.stderr


def test_cudnn_is_for_training_alone_and_never_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_hopper", lambda device: True)
    monkeypatch.setattr(sdpa, "flash_3", lambda device: False)
    cudnn = SDPBackend.CUDNN_ATTENTION
    assert sdpa.kernels(GPU, "auto")[0] == cudnn
    assert cudnn not in sdpa.kernels(GPU, "auto", training=False)
    assert cudnn not in sdpa.WITH_A_MASK
    monkeypatch.setattr(sdpa, "flash_3", lambda device: True)
    assert sdpa.kernels(GPU, "auto")[0] == SDPBackend.FLASH_ATTENTION


def test_a_compiled_block_takes_the_kernel_too() -> None:
    q, k, v = heads(CPU, torch.float32)
    given = 0.125, None, torch.zeros(1, q.shape[2]), None
    math, default = (attention_backend.attention_within(*given, one) for one in (MATH, ()))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(attend: Any) -> torch.Tensor:
        found: torch.Tensor = attend(q, k, v)
        return found

    torch.testing.assert_close(compiled(math), default(q, k, v))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        compiled(math)
    assert not any("flash" in event.key for event in trace.key_averages())
