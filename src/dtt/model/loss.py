"""The head's projection and its cross-entropy in one, without ever holding [N, V] logits.

Shapes: N tokens, D dim, V vocabulary, C tokens of a chunk, B of a block, of which a chunk has
several. Where P processes divide the head's rows, V is what this one has of them.

torch has its own since 2.13; dtt supports older ones. It knows neither soft-cap nor z-loss, nor
autocast, and is several times slower on a CPU (benchmarks/loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dtt.runtime.compilation import compiler

IGNORED = -100
CHUNK_ELEMENTS = 2**26
"""Logits that a CPU holds at a time, unless the caller says otherwise: in bf16 128 MB."""
GPU_CHUNK_ELEMENTS = 2**28, 2**30
"""The same on a GPU, at least and at most: in bf16 512 MB and 2 GB. Each chunk's part is added to
the fp32 gradient of the weight, which is read and written again for it: few chunks are cheaper."""
GPU_CHUNK_SHARE = 1 / 128
"""Of a GPU's memory, for the bf16 logits of a chunk: 2**28 logits on 80 GB, 2**29 on 141 GB."""
GPU_CHUNK_ROWS = 128
"""Of which a GPU's chunks are a multiple: the products then fill whole tiles."""
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
    fused: bool = False,
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

    With `fused`, all between the products is compiled into two passes over a chunk, which move 6
    to 8 bytes for each bf16 logit (uncompiled: 26). Where compilation fails, they run uncompiled,
    block by block.
    """
    how = _How(softcap, z_loss, part, fused)
    device = hidden_ND.device.type
    chunk = chunk or chunk_rows(weight_VD.shape[0], _gpu_memory(hidden_ND.device))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
            apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
            return apply(hidden_ND, weight_VD, targets_N, how, chunk, dtype)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        loss = hidden_ND.new_zeros((), dtype=_sum_dtype(hidden_ND))
        for rows in _slices(len(targets_N), chunk):
            logits_CV = hidden_ND[rows] @ weight_VD.T
            loss += _to_gradient(logits_CV, targets_N[rows], how._replace(z_loss=0.0))
        return loss


def chunk_rows(vocab_size: int, gpu_memory: int | None) -> int:
    """Return the number of tokens of a chunk, on a GPU of so many bytes (None: on a CPU).

    It depends on the total memory, not on what is free: a run must not change with its neighbours.
    """
    if gpu_memory is None:
        return max(1, CHUNK_ELEMENTS // vocab_size)
    least, most = GPU_CHUNK_ELEMENTS
    allowed = int(GPU_CHUNK_SHARE * gpu_memory) // 2  # bytes of a bf16 logit
    elements = min(most, max(least, 1 << (allowed.bit_length() - 1)))
    return max(1, elements // vocab_size // GPU_CHUNK_ROWS) * GPU_CHUNK_ROWS


def _gpu_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


class _How(NamedTuple):
    """The options of `linear_cross_entropy`."""

    softcap: float | None
    z_loss: float
    part: Part | None
    fused: bool


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _blocks(logits_CV: Tensor) -> Iterator[slice]:
    """The rows of each block of a chunk."""
    rows, columns = logits_CV.shape
    return _slices(rows, max(1, BLOCK_ELEMENTS[logits_CV.device.type] // columns))


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _to_gradient(logits_CV: Tensor, targets_C: Tensor, how: _How) -> Tensor:
    """Turn logits, in place, into the gradient of their loss with respect to them; returns it, [].

    Ignored tokens get a gradient, too: it is not used.
    """
    if how.fused:
        return _fused_to_gradient(logits_CV, targets_C, how)
    loss = logits_CV.new_zeros((), dtype=_sum_dtype(logits_CV))
    for rows in _blocks(logits_CV):
        loss += _block_to_gradient(logits_CV[rows], targets_C[rows], how)
    return loss


def _block_to_gradient(logits_BV: Tensor, targets_B: Tensor, how: _How) -> Tensor:
    softcap, z_loss, part, _ = how
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
        whole_B1, logit_B1 = _of_all_parts(part, lse_B1, logit_B1 * here_B1)
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


def _of_all_parts(part: Part, lse_B1: Tensor, logit_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Logsumexp and target's logit over the whole vocabulary; `logit_B1` is 0 where the target's
    row is another process's."""
    each_PB2 = part.gather(torch.cat((lse_B1, logit_B1), dim=1))
    return each_PB2[..., :1].logsumexp(dim=0), each_PB2[..., 1:].sum(dim=0)


def _fused_to_gradient(logits_CV: Tensor, targets_C: Tensor, how: _How) -> Tensor:
    """As `_to_gradient`, over the chunk at once."""
    statistics, gradient_ = _fused_passes()
    column_C1 = targets_C[:, None] - (0 if how.part is None else how.part.first)
    lse_C1, logit_C1 = statistics(logits_CV, column_C1, how.softcap)
    if how.part is not None:
        lse_C1, logit_C1 = _of_all_parts(how.part, lse_C1, logit_C1)
    gradient_(logits_CV, column_C1, lse_C1, how.softcap, how.z_loss)
    return (lse_C1 - logit_C1)[:, 0].masked_fill(targets_C == IGNORED, 0.0).sum()


@cache
def _fused_passes() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
    """`_statistics` and `_gradient_`, compiled."""
    return (
        compiler.compiled(_statistics, otherwise=_statistics_in_blocks),
        compiler.compiled(_gradient_, otherwise=_gradient_in_blocks_),
    )


def _statistics(
    logits_CV: Tensor, column_C1: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Logsumexp [C, 1], and the target's logit [C, 1]: 0 where the target is no column here."""
    logits_CV = logits_CV.to(_sum_dtype(logits_CV))
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    logit_C1 = torch.where(column_V == column_C1, logits_CV, 0.0).sum(dim=1, keepdim=True)
    return logits_CV.logsumexp(dim=1, keepdim=True), logit_C1


def _gradient_(
    logits_CV: Tensor, column_C1: Tensor, lse_C1: Tensor, softcap: float | None, z_loss: float
) -> None:
    """Put softmax * (1 + 2 z lse) - one_hot(target), times the slope of the cap, into the logits.

    A comparison with the number of the column, not a scatter, so that it is one pass.
    """
    capped_CV = logits_CV.to(_sum_dtype(logits_CV))
    if softcap is not None:
        capped_CV = softcap * torch.tanh(capped_CV / softcap)
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    grad_CV = (capped_CV - lse_C1).exp() * (1.0 + 2.0 * z_loss * lse_C1)
    grad_CV = grad_CV - (column_V == column_C1).to(grad_CV.dtype)
    if softcap is not None:
        grad_CV = grad_CV * (1.0 - (capped_CV / softcap).square())
    logits_CV.copy_(grad_CV)


def _statistics_in_blocks(
    logits_CV: Tensor, column_C1: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same; uncompiled, it holds a block in fp32, not a chunk."""
    found = [_statistics(logits_CV[rows], column_C1[rows], softcap) for rows in _blocks(logits_CV)]
    lse, logit = zip(*found, strict=True)
    return torch.cat(lse), torch.cat(logit)


def _gradient_in_blocks_(
    logits_CV: Tensor, column_C1: Tensor, lse_C1: Tensor, softcap: float | None, z_loss: float
) -> None:
    for rows in _blocks(logits_CV):
        _gradient_(logits_CV[rows], column_C1[rows], lse_C1[rows], softcap, z_loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        how: _How,
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
            loss += _to_gradient(grad_CV, targets_C, how)
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
        return (*grads, None, None, None, None)
