"""Causal attention of a rank's chunks of each sequence (context parallelism) by SDPA's kernels.

A chunk attends to all keys before it, and causally to its own. Each is a call of a kernel without a
mask, and the logsumexp of their scores joins both. So cuDNN can compute it, which on an H200 takes
half the time of FlashAttention 2 (`benchmarks/log.md`). One call, causal from the end of the keys,
would save the join, but torch has it for FlashAttention alone.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtt.config.train import AttentionKernel
from dtt.model.architecture import Architecture
from dtt.model.sdpa import running_kernel, side_by_side

Kernel = Literal["flash for CPUs", "cudnn", "flash"]
OPERATORS: dict[Kernel, str] = {
    "flash for CPUs": "_scaled_dot_product_flash_attention_for_cpu",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
}
"""Operators that SDPA calls; `_backward` follows in the names of those for the backward pass."""


def chunk_kernel(
    arch: Architecture,
    device: torch.device,
    length: int,
    requested: AttentionKernel,
    dtype: torch.dtype,
) -> Kernel | None:
    """Return the kernel for chunks of `length` tokens; None if none here gives a logsumexp."""
    if device.type != "cuda":
        return "flash for CPUs"
    if arch.head_dim % 8:
        return None  # SDPA would pad such heads before it calls a kernel
    name = running_kernel(arch, device, length, requested, dtype)
    if name == "cudnn":
        return "cudnn"
    # In fp32 `efficient` runs, which takes no grouped heads and pads the logsumexp.
    return "flash" if name in ("flash", "FlashAttention 3") else None


@dataclass(frozen=True)
class Chunked:
    """Causal attention of chunks of one length, which start at the positions `starts`."""

    scale: float
    starts: tuple[int, ...]
    kernel: Kernel

    def __call__(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        given = (side_by_side(x) for x in (q_BHTK, k_BGSK, v_BGSK))
        out_BHTK: Tensor = _Chunks.apply(*given, self.scale, self.starts, self.kernel)  # type: ignore[no-untyped-call]
        return out_BHTK


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        starts: tuple[int, ...],
        kernel: Kernel,
    ) -> Tensor:
        outs, lses = [], []
        rng: tuple[Tensor, ...] = ()
        for start, queries in zip(starts, q.chunk(len(starts), 2), strict=True):
            joined = None
            for keys, causal in _parts(start, queries.shape[2]):
                part, rng = _attend(kernel, queries, k[:, :, keys], v[:, :, keys], causal, scale)
                joined = part if joined is None else _join(joined, part)
            assert joined is not None
            outs.append(joined[0])
            lses.append(joined[1])
        # [B, T, H, K] in memory, which the output projection reads without a copy.
        out = torch.cat([x.transpose(1, 2) for x in outs], 1).transpose(1, 2)
        ctx.how = scale, starts, kernel
        ctx.save_for_backward(q, k, v, out, *lses, *rng)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, starts, kernel = ctx.how
        q, k, v, out, *rest = ctx.saved_tensors
        count = len(starts)
        grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
        chunks = (x.chunk(count, 2) for x in (side_by_side(grads[0]), q, out))
        for start, grad, queries, made, lse in zip(starts, *chunks, rest[:count], strict=True):
            of_queries = torch.zeros_like(queries)
            for keys, causal in _parts(start, queries.shape[2]):
                given = grad, queries, k[:, :, keys], v[:, :, keys], made, lse
                # With the logsumexp of all keys, the gradients of a part are its summands.
                part_q, part_k, part_v = _gradients(kernel, *given, rest[count:], causal, scale)
                of_queries += part_q
                grad_k[:, :, keys] += part_k
                grad_v[:, :, keys] += part_v
            grad_q.append(of_queries)
        return torch.cat(grad_q, 2), grad_k, grad_v, None, None, None


def _parts(start: int, length: int) -> Iterator[tuple[slice, bool]]:
    """Yield the keys of each call for a chunk, and True if it is causal."""
    yield slice(start, start + length), True
    if start:
        yield slice(0, start), False


def _join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of the attention to the keys of both."""
    (out, lse), (other_out, other_lse) = one, other
    weight = torch.sigmoid(other_lse - lse)[..., None]
    joined = torch.lerp(out.to(lse.dtype), other_out.to(lse.dtype), weight)
    return joined.to(out.dtype), torch.logaddexp(lse, other_lse)


def _attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return output and logsumexp [B, H, T], and the state of random numbers, which none takes."""
    # No bias, and a logsumexp, which cuDNN's computes on request only.
    how = (None, True) if kernel == "cudnn" else ()
    operator = getattr(torch.ops.aten, OPERATORS[kernel])
    results = operator(q, k, v, *how, 0.0, causal, scale=scale)
    return (results[0], results[1].flatten(2)), results[6:8]


def _gradients(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rng: list[Tensor],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given output and logsumexp of all keys."""
    lengths = q.shape[2], k.shape[2]
    how: tuple[Any, ...]
    match kernel:
        case "flash for CPUs":
            how = lse, 0.0, causal
        case "cudnn":
            how = lse[..., None], *rng, None, None, None, *lengths, 0.0, causal
        case _:
            how = lse, None, None, *lengths, 0.0, causal, *rng
    operator = getattr(torch.ops.aten, f"{OPERATORS[kernel]}_backward")
    found: tuple[Tensor, Tensor, Tensor] = operator(grad, q, k, v, out, *how, scale=scale)
    return found
