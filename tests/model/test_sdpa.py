"""SDPA takes the kernel that was asked for, and the log names the one that runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Dtt
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from dtt.base.errors import EnvironmentUnfit
from dtt.config.model import ModelConfig
from dtt.config.train import AttentionKernel
from dtt.model import attention_backend, families, sdpa
from dtt.model.architecture import Architecture

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_scaled_dot_product_attention_math",
}


def arch() -> Architecture:
    cfg = ModelConfig(family="llama", dim=256, n_layers=1, n_heads=4, n_kv_heads=2)
    made = families.get("llama").architecture(cfg, 100, 64)
    return dataclasses.replace(made, attn_scale=0.125)


def heads(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, n, 64, 64) for n in (4, 2, 2)]
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def kernels_run(device: torch.device, dtype: torch.dtype, asked: AttentionKernel) -> set[str]:
    """Those that the profiler sees in a forward and backward pass."""
    tokens = torch.zeros(2, 64, dtype=torch.long, device=device)
    (causal,) = attention_backend.make_attention_fns(arch(), tokens, None, None, asked)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        causal(*heads(device, dtype)).sum().backward()
    seen = {event.key for event in trace.key_averages()}
    return {name for name, op in NAMES.items() if any(op in key for key in seen)}


@pytest.mark.parametrize("asked", ["auto", "flash", "math"])
def test_the_kernel_that_is_named_is_the_one_that_runs(asked: AttentionKernel) -> None:
    named = sdpa.running_kernel(arch(), CPU, 64, asked, torch.float32)
    assert kernels_run(CPU, torch.float32, asked) == {named}
    assert asked in ("auto", named)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", ["auto", "cudnn", "flash", "efficient", "math"])
def test_on_a_gpu_the_kernel_that_is_named_runs(asked: AttentionKernel, dtype: torch.dtype) -> None:
    try:
        named = sdpa.running_kernel(arch(), GPU, 64, asked, dtype)
    except EnvironmentUnfit:
        assert asked in ("cudnn", "flash")
        return
    assert kernels_run(GPU, dtype, asked) == {named.replace("FlashAttention 3", "flash")}


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


def test_a_compiled_block_takes_the_kernel_too(tmp_path: Path) -> None:
    causal = attention_backend.Causal(0.125, (SDPBackend.MATH,))
    q, k, v = heads(CPU, torch.float32)
    compiled = torch.compile(causal.__call__, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention_backend.Causal(0.125)(q, k, v))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        compiled(q, k, v)
    assert not any("flash" in event.key for event in trace.key_averages())
