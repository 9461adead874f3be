"""The head's projection and its cross-entropy in one, without ever holding [N, V] logits.

Shapes: N tokens, D dim, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at a time, unless the caller says otherwise: 128 MB in fp32; 1 GB on a GPU, where
adding each chunk's part to the weight's gradient is the dearer, the smaller the chunks are."""


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int | None = None
) -> Tensor:
    """Sum over tokens of cross_entropy(hidden @ weight.T, target), in nats, as an fp32 scalar.

    Equal to `F.cross_entropy(..., ignore_index=-100, reduction="sum")`. `chunk` tokens are worked
    on at a time; when gradients are wanted they are computed along the way, so that the logits are
    computed once and never kept. Under autocast the products are taken in its dtype; the loss and
    the sum of the weight's gradient are fp32.
    """
    device = hidden_ND.device.type
    chunk = chunk or max(1, CHUNK_ELEMENTS[device] // weight_VD.shape[0])
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
            apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
            return apply(hidden_ND, weight_VD, targets_N, chunk, dtype)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            loss += _chunk_loss(hidden_ND[rows], weight_VD, targets_N[rows])[0]
        return loss


def _chunk_loss(h_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, and the fp32 log-probabilities [C, V]."""
    logp_CV = torch.log_softmax(h_CD @ weight_VD.T, dim=-1, dtype=torch.float32)
    picked_C = logp_CV.gather(1, targets_C.clamp(min=0)[:, None])[:, 0]
    return -picked_C.masked_fill(targets_C == IGNORED, 0.0).sum(), logp_CV


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """The loss, with both gradients computed while each chunk's logits are there."""
        hidden, weight = hidden_ND.to(dtype), weight_VD.to(dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            targets_C = targets_N[rows]
            ignored_C1 = (targets_C == IGNORED)[:, None]
            part, logp_CV = _chunk_loss(hidden[rows], weight, targets_C)
            loss += part
            grad_logits = logp_CV.exp_()  # softmax - one_hot(target), in place
            one = grad_logits.new_full((), -1.0).expand(len(targets_C), 1)
            grad_logits.scatter_add_(1, targets_C.clamp(min=0)[:, None], one)
            grad_logits = grad_logits.to(hidden.dtype)
            # Ignored rows are zeroed in the narrow [C, D] factors, not in the wide gradient.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits @ weight).masked_fill_(ignored_C1, 0.0)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows].masked_fill(ignored_C1, 0.0)
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
        return (*grads, None, None, None)
