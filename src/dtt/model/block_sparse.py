"""Block-sparse CPU attention: exact, within documents and windows, in linear memory.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads, K head_dim. T = S, except
under context parallelism, where the queries are some chunks of the sequence.

torch's flash kernel for CPUs takes dense masks only, so it is called for one tile at a time: a
range of queries, and the keys they may attend to. The first tile of a document is plain causal
attention over the document, or over its first `window` tokens. The rest of a longer document, or
of one that starts before the chunk, is split into tiles of `TILE` queries and their visible keys,
under a mask that all such tiles share. Two custom operators, forward and backward, hide the tiles
from the compiler: they differ in every batch, and each would need its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtt.mesh.dtypes import wide_dtype
from dtt.model.sdpa import side_by_side

TILE = 128
"""Queries of a tile with a mask: larger tiles would read more keys that most of their
queries may not attend to."""

# The operators that SDPA calls. No public function returns what the backward pass needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class Tile(NamedTuple):
    """Slices of B, T and S that are computed together.

    Without a mask, queries and keys are the same tokens, and attention is causal.
    """

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None


def tiled_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    doc_ids_BS: Tensor | None,
    window: int | None,
    scale: float,
    starts: Sequence[int] = (0,),
) -> Tensor:
    """Return softmax(scale * q kᵀ) v [B, H, T, K] over the last `window` tokens of a document.

    `doc_ids_BS` holds document ids, and documents are contiguous; None: each sequence is one
    document. The queries are chunks of one length; those of chunk i are at the positions from
    `starts[i]` on.
    """
    out: Tensor
    out, _ = torch.ops.dtt.tiled_attention(
        q_BHTK, k_BGSK, v_BGSK, doc_ids_BS, window, scale, starts
    )
    return out


def tiles(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    doc_ids_BS: Tensor | None,
    window: int | None,
    starts: Sequence[int],
) -> Iterator[Tile]:
    """Yield tiles such that every query is in one tile, with all keys it may attend to."""
    S, chunk = k_BGSK.shape[2], q_BHTK.shape[2] // len(starts)
    # A longer window than the sequence would only enlarge the shared mask of `_near`.
    window = S if window is None else min(window, S)
    for row, first, stop in _documents(S, doc_ids_BS):
        for i, start in enumerate(starts):
            begin, end = max(first, start), min(stop, start + chunk)
            shift = start - i * chunk  # from a query's index to its position
            # This rank has the first token of the document. For its first `window` tokens the
            # window limits nothing, so they need no mask, and the kernel skips the upper triangle.
            if begin == first < end:
                begin = min(end, first + window)
                yield Tile(row, slice(first - shift, begin - shift), slice(first, begin), None)
            for left in range(begin, end, TILE):
                right, oldest = min(left + TILE, end), left - window + 1
                # At most window - 1 + TILE keys: this bound makes time and memory linear in the
                # length.
                keys = slice(max(first, oldest), right)
                near = _near(window, q_BHTK.dtype)
                # Near the start of a document the window reaches before it; those columns are cut
                # off.
                mask = near[: right - left, keys.start - oldest : right - oldest]
                yield Tile(row, slice(left - shift, right - shift), keys, mask)


def _documents(S: int, doc_ids_BS: Tensor | None) -> Iterator[tuple[slice, int, int]]:
    """Yield the rows, the first token and the end (exclusive) of each document."""
    if doc_ids_BS is None:
        yield slice(None), 0, S
        return
    for row, doc_ids_S in enumerate(doc_ids_BS):
        stop = 0
        # Lengths differ in every batch. On a CPU, reading them costs no synchronisation.
        for length in torch.unique_consecutive(doc_ids_S, return_counts=True)[1].tolist():
            start, stop = stop, stop + length
            yield slice(row, row + 1), start, stop


@lru_cache(maxsize=8)
def _near(window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of a tile, [TILE, window - 1 + TILE].

    It is 0 where query i may attend, to the keys i … i + window - 1, and -inf elsewhere.
    """
    near = torch.ones(TILE, window - 1 + TILE, dtype=torch.bool).tril_(window - 1).triu_()
    # Additive: the operator below takes no boolean mask. SDPA converts one on every call; here it
    # is done once for all tiles.
    return torch.zeros(near.shape, dtype=dtype).masked_fill_(~near, float("-inf"))


def _tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logsumexp of each query's scores [B, H, T] in at least fp32."""
    out, lse = _outputs(q)
    q, k, v = map(side_by_side, (q, k, v))
    for rows, queries, keys, mask in tiles(q, k, documents, window, starts):
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
    """Allocate both outputs in the layout [B, T, H, K], which the output projection reads."""
    # Attention.forward transposes back and flattens the heads, which is a view of this layout. With
    # [B, H, T, K] in memory, each layer would copy its output.
    B, H, T, K = q.shape
    out = q.new_empty(B, T, H, K).transpose(1, 2)
    # The logsumexp lets the backward pass recompute the probabilities tile by tile.
    return out, q.new_empty(B, T, H, dtype=wide_dtype(q)).transpose(1, 2)


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
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    A key may be in several tiles with masks, so its gradient is summed in at least fp32.
    """
    grad_q, grad_k, grad_v = _gradients(grad, q, k, v)
    sum_k, sum_v = (torch.zeros_like(x, dtype=wide_dtype(x)) for x in (k, v))
    grad, q, k, v = map(side_by_side, (grad, q, k, v))
    for rows, queries, keys, mask in tiles(q, k, documents, window, starts):
        grad_q[rows, :, queries], part_k, part_v = _flash_backward(
            grad[rows, :, queries],
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            out[rows, :, queries],
            lse[rows, :, queries],
            # no dropout
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
    """Allocate the gradients."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # `out` and `lse` are kept instead of probabilities: memory stays linear in T.
    q, k, v, documents, *ctx.limits = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grads = torch.ops.dtt.tiled_attention_backward(grad, *saved, *ctx.limits)
    return *grads, None, None, None, None


torch.library.define(
    "dtt::tiled_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, int? window, float scale,"
    " int[] starts) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "dtt::tiled_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents,"
    " int? window, float scale, int[] starts) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("dtt::tiled_attention", "cpu", _tiled)
torch.library.impl("dtt::tiled_attention_backward", "cpu", _tiled_backward)
torch.library.register_fake("dtt::tiled_attention", _outputs)
torch.library.register_fake("dtt::tiled_attention_backward", _gradients)
torch.library.register_autograd("dtt::tiled_attention", _differentiate, setup_context=_keep)
