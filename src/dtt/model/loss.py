"""The head's projection and its cross-entropy in one, without ever holding [N, V] logits.

Shapes: N tokens, D dim, V vocabulary, C tokens of a chunk, B of a block, of which a chunk has
several. Where P processes divide the head's rows, V is what this one has of them.

torch has its own since 2.13; dtt supports older ones. It knows neither soft-cap nor z-loss, nor
autocast, and is several times slower on a CPU (benchmarks/loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}
"""Logits held at a time, unless the caller says otherwise: in bf16 128 MB; 512 MB on a GPU, where
adding each chunk's part to the weight's gradient is the dearer, the smaller the chunks are."""
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Of them in fp32 at a time: what a CPU's cache holds; 256 MB on a GPU."""


class Part(Protocol):
    """The rows of the head that this process holds, where others hold the rest of the vocabulary.

    All of them call for the same tokens at the same time.
    """

    first: int
    """The token of the first row."""

    def gather(self, x: Tensor) -> Tensor:
        """[P, ...]: the `x` of every process, the same on all of them; no gradient goes back."""


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    part: Part | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Sum over tokens of cross_entropy(hidden @ weight.T, target), in nats, as an fp32 scalar.

    Equal to `F.cross_entropy(..., ignore_index=-100, reduction="sum")`. With `softcap`, logits x
    become softcap * tanh(x / softcap) before it (Gemma 2, arXiv 2408.00118, section 2). With
    `z_loss`, gradients are those of the sum plus z_loss * logsumexp(logits)^2 of every token that
    is not ignored (PaLM, arXiv 2204.02311, section 5); the value stays the cross-entropy, so that
    runs with and without compare.

    `chunk` tokens are worked on at a time; when gradients are wanted they are computed along the
    way, so that the logits are computed once and never kept. Under autocast the products are taken
    in its dtype; the loss and the sum of the weight's gradient are fp32 (fp64 for fp64 inputs).

    With `part`, `weight_VD` is this process's rows. The loss, on every process, is then that over
    the whole vocabulary; the gradient of `hidden_ND` is what these rows add to it (Megatron-LM,
    arXiv 1909.08053, section 3). Of each token two numbers are exchanged.
    """
    device = hidden_ND.device.type
    chunk = chunk or max(1, CHUNK_ELEMENTS[device] // weight_VD.shape[0])
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
            apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
            return apply(hidden_ND, weight_VD, targets_N, softcap, z_loss, part, chunk, dtype)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        loss = hidden_ND.new_zeros((), dtype=_sum_dtype(hidden_ND))
        for rows in _slices(len(targets_N), chunk):
            logits_CV = hidden_ND[rows] @ weight_VD.T
            loss += _to_gradient(logits_CV, targets_N[rows], softcap, 0.0, part)
        return loss


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _to_gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    softcap: float | None,
    z_loss: float,
    part: Part | None,
) -> Tensor:
    """Turn logits, in place, into the gradient of their loss with respect to them; returns it, [].

    Ignored tokens get a gradient, too: it is not used.
    """
    block = max(1, BLOCK_ELEMENTS[logits_CV.device.type] // logits_CV.shape[1])
    loss = logits_CV.new_zeros((), dtype=_sum_dtype(logits_CV))
    for rows in _slices(len(targets_C), block):
        loss += _block_to_gradient(logits_CV[rows], targets_C[rows], softcap, z_loss, part)
    return loss


def _block_to_gradient(
    logits_BV: Tensor,
    targets_B: Tensor,
    softcap: float | None,
    z_loss: float,
    part: Part | None,
) -> Tensor:
    dtype = _sum_dtype(logits_BV)
    capped_BV = logits_BV
    if softcap is not None:
        capped_BV = logits_BV.to(dtype).div_(softcap).tanh_().mul_(softcap)
    grad_BV = torch.softmax(capped_BV, dim=1, dtype=dtype)
    # Of the largest logit alone: its probability is never too small to take the logarithm of.
    largest_B1 = capped_BV.amax(dim=1, keepdim=True)
    lse_B1 = largest_B1 - grad_BV.amax(dim=1, keepdim=True).log()
    wanted_B1 = targets_B[:, None] - (0 if part is None else part.first)
    column_B1 = wanted_B1.clamp(0, logits_BV.shape[1] - 1)
    here_B1 = (column_B1 == wanted_B1).to(dtype)
    logit_B1 = capped_BV.gather(1, column_B1).to(dtype)
    if part is not None:  # so far of these rows alone
        each_PB2 = part.gather(torch.cat((lse_B1, logit_B1 * here_B1), dim=1))
        whole_B1 = each_PB2[..., :1].logsumexp(dim=0)
        logit_B1 = each_PB2[..., 1:].sum(dim=0)
        grad_BV.mul_((lse_B1 - whole_B1).exp_())
        lse_B1 = whole_B1
    # softmax * (1 + 2 z lse) - one_hot(target), times the slope of the cap, 1 - tanh^2
    if z_loss:
        grad_BV.mul_(1.0 + 2.0 * z_loss * lse_B1)
    grad_BV.scatter_add_(1, column_B1, -here_B1)
    if softcap is not None:
        grad_BV.mul_(capped_BV.div_(softcap).square_().neg_().add_(1.0))
    logits_BV.copy_(grad_BV)
    return (lse_B1 - logit_B1)[:, 0].masked_fill(targets_B == IGNORED, 0.0).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        part: Part | None,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """The loss, with both gradients computed while each chunk's logits are there."""
        hidden, weight = hidden_ND.to(dtype), weight_VD.to(dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        sum_dtype = _sum_dtype(hidden)
        loss = hidden.new_zeros((), dtype=sum_dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        for rows in _slices(len(targets_N), chunk):
            h_CD, targets_C = hidden[rows], targets_N[rows]
            ignored_C1 = (targets_C == IGNORED)[:, None]
            grad_CV = h_CD @ weight.T  # the logits, so far
            loss += _to_gradient(grad_CV, targets_C, softcap, z_loss, part)
            # Ignored rows are zeroed in the narrow [C, D] factors, not in the wide gradient.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_CV @ weight).masked_fill_(ignored_C1, 0.0)
            if wants_weight:
                h_CD = h_CD.masked_fill(ignored_C1, 0.0)
                if grad_weight is None:
                    grad_weight = (grad_CV.T @ h_CD).to(sum_dtype)
                elif h_CD.dtype == sum_dtype:
                    grad_weight.addmm_(grad_CV.T, h_CD)
                else:
                    grad_weight += grad_CV.T @ h_CD
            del grad_CV  # nothing of a chunk is to be there longer than it is needed
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by that of the loss, in place: they serve once."""
        (grad_loss,) = grad_outputs
        grads = (
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None, None, None)
