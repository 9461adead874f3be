"""Attention with a dense mask, against which block-sparse attention is compared."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 0.3


def heads(
    rows: int, length: int, n_heads: int, n_kv_heads: int, width: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as projections give them, with the heads of a token together."""
    shapes = [(rows, length, n, width) for n in (n_heads, n_kv_heads, n_kv_heads)]
    q, k, v = (torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)
    return q, k, v


def documents_of(rows: int, length: int, share: float) -> Tensor:
    """Numbers of documents, a new one beginning at about `share` of the tokens."""
    return (torch.rand(rows, length) < share).cumsum(1)


def may_attend(length: int, documents: Tensor | None, window: int | None) -> Tensor:
    """[B or 1, 1, T, T]."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    if documents is None:
        return seen[None, None]
    return seen & (documents[:, None, :, None] == documents[:, None, None, :])


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (SCALE * q @ k.transpose(2, 3)).masked_fill(~mask.to(q.device), float("-inf"))
    return scores.softmax(-1) @ v


def assert_the_same(
    got: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], tolerance: float
) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(got)
    grads = torch.autograd.grad((got * weights).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(grads, expected_grads, rtol=tolerance, atol=tolerance)


def chunks_of(rank: int, ranks: int, length: int) -> list[range]:
    """One from either end, as `length` tokens are shared by processes."""
    starts = rank * length, (2 * ranks - 1 - rank) * length
    return [range(start, start + length) for start in starts]
