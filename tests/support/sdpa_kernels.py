"""The kernels that SDPA runs, as the profiler sees them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dtt.config.model import ModelConfig
from dtt.config.train import AttentionKernel
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.token_context import Context

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
    (causal,) = Context(tokens, None, asked).attention_fns(arch())
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        causal(*heads(device, dtype)).sum().backward()
    seen = {event.key for event in trace.key_averages()}
    return {name for name, op in NAMES.items() if any(op in key for key in seen)}
