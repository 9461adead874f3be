"""Attention within documents and windows on a CPU: exact, in memory that grows as the tokens do.

Shapes: B sequences, T tokens, H query heads, G key/value heads, K head_dim.

torch's flash kernel for CPUs takes dense masks only. So it is called for one tile at a time: some
queries, and those keys that they may attend to. That is a whole document, or the last W keys before
each of `TILE` queries, under one small mask that all tiles share. Two operators of our own do it,
one for each direction: the compiler sees neither the tiles, which every batch has others of, nor a
tensor for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 128
"""Queries of a tile in a window: more would look at keys that few of them may see."""

# What SDPA calls; it has no public name that also gives what the backward pass needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class Tile(NamedTuple):
    """Queries and keys as slices of T. Without a mask they are the same, and attention causal."""

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None


def tiled_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    documents_BT: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """softmax(scale * q kᵀ) v [B, H, T, K] over the last `window` tokens of the same document.

    Documents are numbered, and each is in one piece; None: every sequence is one.
    """
    out: Tensor
    out, _ = torch.ops.dtt.tiled_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT, window, scale)
    return out


def tiles(
    shape: tuple[int, int], documents_BT: Tensor | None, window: int | None, dtype: torch.dtype
) -> Iterator[Tile]:
    """Cut [B, T] tokens: every query is in one tile, with all keys that it may attend to."""
    window = shape[1] if window is None else window
    for row, start, stop in _documents(shape, documents_BT):
        first = min(stop, start + window)
        yield Tile(row, slice(start, first), slice(start, first), None)
        for begin in range(first, stop, TILE):
            end = min(begin + TILE, stop)
            keys = slice(begin - window + 1, end)
            mask = _near(window, dtype)[: end - begin, : end - keys.start]
            yield Tile(row, slice(begin, end), keys, mask)


def _documents(
    shape: tuple[int, int], documents_BT: Tensor | None
) -> Iterator[tuple[slice, int, int]]:
    """Rows, first token, and the one after the last, of each document."""
    if documents_BT is None:
        yield slice(None), 0, shape[1]
        return
    for row, documents_T in enumerate(documents_BT):
        stop = 0
        for length in torch.unique_consecutive(documents_T, return_counts=True)[1].tolist():
            start, stop = stop, stop + length
            yield slice(row, row + 1), start, stop


@lru_cache(maxsize=8)
def _near(window: int, dtype: torch.dtype) -> Tensor:
    """[TILE, window - 1 + TILE]: 0 where query i may attend to the keys i … i + window - 1."""
    near = torch.ones(TILE, window - 1 + TILE, dtype=torch.bool).tril_(window - 1).triu_()
    return torch.zeros(near.shape, dtype=dtype).masked_fill_(~near, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _side_by_side(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the numbers of a head next to each other: the kernel looks nowhere else."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of each softmax's denominator [B, H, T], at least fp32."""
    out, lse = _outputs(q)
    q, k, v = _side_by_side(q, k, v)
    for rows, queries, keys, mask in tiles((q.shape[0], q.shape[2]), documents, window, q.dtype):
        out[rows, :, queries], lse[rows, :, queries] = _flash(
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            is_causal=mask is None,
            attn_mask=mask,
            scale=scale,
        )
    return out, lse


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Memory for both, with the heads of a token side by side, as the output projection reads."""
    B, H, T, K = q.shape
    out = q.new_empty(B, T, H, K).transpose(1, 2)
    return out, q.new_empty(B, T, H, dtype=_wide(q)).transpose(1, 2)


def _tiled_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. A key is in several tiles of a window: its sum is at least fp32."""
    grad_q, grad_k, grad_v = _gradients(grad, q, k, v)
    sum_k, sum_v = torch.zeros_like(k, dtype=_wide(k)), torch.zeros_like(v, dtype=_wide(v))
    grad, q, k, v = _side_by_side(grad, q, k, v)
    for rows, queries, keys, mask in tiles((q.shape[0], q.shape[2]), documents, window, q.dtype):
        grad_q[rows, :, queries], part_k, part_v = _flash_backward(
            grad[rows, :, queries],
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            out[rows, :, queries],
            lse[rows, :, queries],
            0.0,
            is_causal=mask is None,
            attn_mask=mask,
            scale=scale,
        )
        sum_k[rows, :, keys] += part_k
        sum_v[rows, :, keys] += part_v
    return grad_q, grad_k.copy_(sum_k), grad_v.copy_(sum_v)


def _gradients(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grads = torch.ops.dtt.tiled_attention_backward(grad, *saved, ctx.window, ctx.scale)
    return *grads, None, None, None


torch.library.define(
    "dtt::tiled_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, int? window, float scale)"
    " -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "dtt::tiled_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents,"
    " int? window, float scale) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("dtt::tiled_attention", "cpu", _tiled)
torch.library.impl("dtt::tiled_attention_backward", "cpu", _tiled_backward)
torch.library.register_fake("dtt::tiled_attention", _outputs)
torch.library.register_fake("dtt::tiled_attention_backward", _gradients)
torch.library.register_autograd("dtt::tiled_attention", _differentiate, setup_context=_keep)
