"""The head's projection and its cross-entropy in one, without ever holding [N, V] logits.

Shapes: N tokens, D dim, V vocabulary, C tokens of one chunk. Where P processes divide the head's
rows, V is what this one has of them.

torch has its own since 2.13; dtt supports older ones. It knows neither soft-cap nor z-loss, nor
autocast, and is several times slower on a CPU (benchmarks/loss.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at a time, unless the caller says otherwise: 128 MB in fp32; 1 GB on a GPU, where
adding each chunk's part to the weight's gradient is the dearer, the smaller the chunks are."""


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
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            loss += _chunk_loss(hidden_ND[rows], weight_VD, targets_N[rows], softcap, part)[0]
        return loss


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _chunk_loss(
    h_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, softcap: float | None, part: Part | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of some tokens, their log-probabilities [C, V], and the logsumexp of their logits
    [C, 1] over the whole vocabulary; each in fp32 or wider."""
    logits_CV = h_CD @ weight_VD.T
    if softcap is not None:
        wide_CV = logits_CV.to(_sum_dtype(h_CD))
        logits_CV = wide_CV.div_(softcap).tanh_().mul_(softcap)
    logp_CV = torch.log_softmax(logits_CV, dim=-1, dtype=_sum_dtype(h_CD))
    column_C1, here_C1 = _columns(targets_C, logits_CV.shape[1], part)
    picked_C1 = logp_CV.gather(1, column_C1)
    logit_C1 = logits_CV.gather(1, column_C1)
    lse_C1 = logit_C1 - picked_C1
    if part is not None:  # so far of these rows alone
        logit_C1 = logit_C1.masked_fill(~here_C1, 0.0)
        each_PC2 = part.gather(torch.cat((lse_C1, logit_C1.type_as(lse_C1)), dim=1))
        whole_C1 = each_PC2[..., :1].logsumexp(dim=0)
        picked_C1 = each_PC2[..., 1:].sum(dim=0) - whole_C1
        logp_CV += lse_C1 - whole_C1
        lse_C1 = whole_C1
    return -picked_C1[:, 0].masked_fill(targets_C == IGNORED, 0.0).sum(), logp_CV, lse_C1


def _columns(targets_C: Tensor, rows: int, part: Part | None) -> tuple[Tensor, Tensor]:
    """Where among these logits each target's is, and whether it is there at all; [C, 1] each."""
    wanted_C = targets_C if part is None else targets_C - part.first
    column_C = wanted_C.clamp(0, rows - 1)
    return column_C[:, None], (column_C == wanted_C)[:, None]


def _grad_logits(
    logp_CV: Tensor,
    lse_C1: Tensor,
    targets_C: Tensor,
    softcap: float | None,
    z_loss: float,
    part: Part | None,
) -> Tensor:
    """Gradient of the loss with respect to the logits before the cap; takes the memory of `logp`.

    Ignored tokens get one, too: it is not used.
    """
    slope_CV = None
    if softcap is not None:  # of the cap: 1 - tanh^2, from the capped logits logp + lse
        slope_CV = logp_CV.add(lse_C1).div_(softcap).square_().neg_().add_(1.0)
    grad_CV = logp_CV.exp_()  # softmax * (1 + 2 z lse) - one_hot(target), in place
    if z_loss:
        grad_CV.mul_(1.0 + 2.0 * z_loss * lse_C1)
    column_C1, here_C1 = _columns(targets_C, grad_CV.shape[1], part)
    grad_CV.scatter_add_(1, column_C1, -here_C1.type_as(grad_CV))
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


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
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            targets_C = targets_N[rows]
            ignored_C1 = (targets_C == IGNORED)[:, None]
            chunk_loss, logp_CV, lse_C1 = _chunk_loss(
                hidden[rows], weight, targets_C, softcap, part
            )
            loss += chunk_loss
            grad_logits = _grad_logits(logp_CV, lse_C1, targets_C, softcap, z_loss, part)
            del logp_CV  # nothing of a chunk is to be there longer than it is needed
            grad_logits = grad_logits.to(hidden.dtype)
            # Ignored rows are zeroed in the narrow [C, D] factors, not in the wide gradient.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits @ weight).masked_fill_(ignored_C1, 0.0)
            if grad_weight is not None:
                h_CD = hidden[rows].masked_fill(ignored_C1, 0.0)
                if h_CD.dtype == sum_dtype:
                    grad_weight.addmm_(grad_logits.T, h_CD)
                else:
                    grad_weight += grad_logits.T @ h_CD
            del grad_logits
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
