"""Selection of the kernel of `scaled_dot_product_attention` (SDPA).

Shapes: B sequences, T tokens, S tokens of keys, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtt.base.errors import EnvironmentUnfit
from dtt.config.train import AttentionKernel
from dtt.model.architecture import Architecture

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An attention function: queries [B, H, T, K], keys and values [B, G, T, K] → [B, H, T, K]."""
Kernels = tuple[SDPBackend, ...]
"""Kernels that SDPA may use, in order of preference; empty: PyTorch's default choice."""

KERNELS: dict[AttentionKernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
WITH_A_MASK: Kernels = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Kernels for attention with a mask.

Flash supports no mask, and the backward pass of cuDNN's kernel returns NaN with one
(pytorch#196678).
"""


def kernels(device: torch.device, requested: AttentionKernel, *, training: bool = True) -> Kernels:
    """Return the kernels for causal attention without a mask, in order of preference.

    cuDNN is used only in training, where shapes repeat: it plans each new shape, and in generation
    every token has a new length.
    """
    # A kernel that was asked for must not be replaced silently.
    if requested != "auto":
        return (KERNELS[requested],)
    if device.type != "cuda":
        return ()
    cudnn = (KERNELS["cudnn"],) if training and _hopper(device) and not flash_3(device) else ()
    return (*cudnn, KERNELS["flash"], KERNELS["efficient"], KERNELS["math"])


@cache
def _hopper(device: torch.device) -> bool:
    """Return True for a Hopper GPU or a newer one."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def running_kernel(
    arch: Architecture,
    device: torch.device,
    seq_len: int,
    requested: AttentionKernel,
    dtype: torch.dtype,
) -> str:
    """Return the name of the kernel that SDPA selects for one training sequence.

    The name comes from PyTorch's own dispatcher. Raises EnvironmentUnfit if the requested kernel
    does not support these sizes and `dtype`.
    """
    shapes = [(1, n, seq_len, arch.head_dim) for n in (arch.n_heads, arch.n_kv_heads)]
    # Gradients are required, because kernels support fewer sizes in the backward pass.
    q, k = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    allowed = kernels(device, requested)
    q, k, v, grouped = _for_kernels(q, k, k, allowed)
    try:
        with _only(allowed):
            chosen = SDPBackend(
                torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)  # noqa: SLF001
            )
    # a dispatcher without a kernel raises, or returns a number that is no SDPBackend
    except (RuntimeError, ValueError):
        chosen = SDPBackend.ERROR
    if chosen == SDPBackend.ERROR:
        raise EnvironmentUnfit(
            f"train.attention={requested} cannot compute attention here",
            why=f"PyTorch does not support it on {device.type} for "
            f"{str(dtype).removeprefix('torch.')}, "
            f"heads of {arch.head_dim}, {arch.n_heads} of queries and {arch.n_kv_heads} of keys",
            next="train.attention=auto",
        )
    if chosen == KERNELS["flash"] and flash_3(device):
        return "FlashAttention 3"
    return next(name for name, backend in KERNELS.items() if backend == chosen)


@cache
def flash_3(device: torch.device) -> bool:
    """Return True if SDPA's flash kernel is FlashAttention 3, and activate it if it is available.

    It needs a Hopper GPU and the package flash-attn-3 (module `flash_attn_interface`).
    """
    # find_spec looks for the package without importing it.
    if device.type != "cuda" or find_spec("flash_attn_interface") is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")
    return True


def sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Kernels, **how: Any) -> Tensor:
    """Compute attention with one of the kernels `allowed`.

    Shapes: queries [B, H, T, K], keys and values [B, G, S, K], result [B, H, T, K]. Kernels are
    selected inside the call, so that the recomputation under activation checkpointing uses the same
    kernel as the forward pass.
    """
    q, k, v, grouped = _for_kernels(q, k, v, allowed)
    with _only(allowed):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how)


def _for_kernels(
    q: Tensor, k: Tensor, v: Tensor, allowed: Kernels
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return q, k, v in a form that the kernels support, and True if heads are still grouped.

    The `efficient` kernel needs the same number of key heads as query heads, so keys and values are
    repeated for it. PyTorch would use it with a mask and in fp32; with grouped heads it would fall
    back to `math`, which materialises all scores.
    """
    grouped = grouped_heads(q, k)
    first = allowed[0] if allowed else None
    # In fp32 only `efficient` and `math` remain on a GPU: flash and cuDNN take 16-bit numbers.
    efficient = first == KERNELS["efficient"] or (q.is_cuda and q.dtype is torch.float32)
    if grouped and efficient:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return q, k, v, grouped


def _only(allowed: Kernels) -> AbstractContextManager[Any]:
    """Restrict SDPA inside the context to these kernels; the first supported one is used."""
    return sdpa_kernel(list(allowed), set_priority=True) if allowed else nullcontext()


def grouped_heads(q_BHTK: Tensor, k_BGTK: Tensor) -> bool:
    """Return True if several query heads share one key/value head."""
    return q_BHTK.shape[1] != k_BGTK.shape[1]


def side_by_side(x: Tensor) -> Tensor:
    """Return a tensor with a contiguous last dimension, which kernels take; RoPE leaves others."""
    return x if x.stride(-1) == 1 else x.contiguous()
