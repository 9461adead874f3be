"""Fused linear cross-entropy: the head's projection and the loss, without [N, V] logits.

Shapes: N tokens, D dim, V vocabulary, C tokens of a chunk, B tokens of a block (a chunk has
several). If P ranks shard the head's rows, V is the size of this rank's shard.

torch has its own implementation since 2.13; dtt supports older versions. torch's supports neither
soft-capping, nor z-loss, nor autocast, and is several times slower on a CPU (benchmarks/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtt.base.targets import IGNORE_INDEX
from dtt.mesh.collectives import gather
from dtt.mesh.compilation import compiler
from dtt.mesh.dtypes import wide, wide_dtype

CHUNK_ELEMENTS = 2**26
"""Logits per chunk on a CPU, unless the caller sets `chunk`: 128 MB in bf16."""
GPU_CHUNK_ELEMENTS = 2**28, 2**30
"""Minimum and maximum logits per chunk on a GPU: 512 MB and 2 GB in bf16. Each chunk adds its part
to the fp32 gradient of the weight, which is read and written again each time: few chunks are
cheaper."""
GPU_CHUNK_SHARE = 1 / 128
"""Fraction of a GPU's memory for the bf16 logits of a chunk: 2**28 logits on 80 GB, 2**29 on 141
GB."""
GPU_CHUNK_ROWS = 128
"""Chunk sizes on a GPU are a multiple of this, so that matrix multiplications fill complete
tiles."""
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits converted to fp32 at a time: what fits in a CPU's cache; 256 MB on a GPU."""


class VocabularyPart:
    """The vocabulary shard of this rank, under tensor parallelism."""

    def __init__(self, mesh: DeviceMesh, vocab_size: int) -> None:
        """Describe the shard of a vocabulary that `mesh` divides equally."""
        self.first = mesh.get_local_rank() * (vocab_size // mesh.size())
        self.group = mesh.get_group()

    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """All-gather [...] → [P, ...], the same on all ranks, without a gradient."""
        return gather(x[None], 0, self.group)

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """Return the part [B, T/P] of this rank's tokens between the layers."""
        return x_BT.chunk(self.group.size(), 1)[self.group.rank()]


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    part: VocabularyPart | None = None,
    chunk: int | None = None,
    fused: bool = False,
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Return the sum over tokens of cross_entropy(hidden @ weight.T, target), in nats, in fp32.

    The result is a scalar equal to `F.cross_entropy(..., reduction="sum")`: tokens whose target is
    IGNORE_INDEX are ignored. With `reduction="none"` it is [N], the cross-entropy of each token, 0
    where it is ignored. With `softcap`, logits x are first mapped to softcap * tanh(x /
    softcap) (Gemma 2, arXiv 2408.00118, section 2). With `z_loss`, gradients are those of the sum
    plus z_loss * logsumexp(logits)^2 of every token that is not ignored (PaLM, arXiv 2204.02311,
    section 5); the returned value stays the cross-entropy, so that runs with and without z-loss are
    comparable.

    Logits are computed for `chunk` tokens at a time. If gradients are needed, they are computed in
    the forward pass, so that logits are computed only once and never stored. With
    `reduction="none"` that is impossible, because the gradient of the weight depends on the factor
    of each token; the backward pass then computes the logits again. Under autocast, matrix
    multiplications run in its dtype; the loss and the accumulated gradient of the weight are fp32
    (fp64 for fp64 inputs).

    With `part`, `weight_VD` holds this rank's rows. The loss is then over the full
    vocabulary, on every rank, and the gradient of `hidden_ND` is the contribution of these rows
    (Megatron-LM, arXiv 1909.08053, section 3). The ranks exchange two numbers per token.

    With `fused`, the operations between the matrix multiplications are compiled into two passes
    over a chunk, which move 6 to 8 bytes per bf16 logit (uncompiled: 26). If compilation fails,
    they run uncompiled, block by block.
    """
    how = _How(softcap, z_loss, part, fused)
    device = hidden_ND.device.type
    chunk = chunk or chunk_rows(weight_VD.shape[0], _gpu_memory(hidden_ND.device))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    # This function casts once, below. Autocast would cast the fp32 weight again for every chunk: it
    # caches leaves only, and `weight.T` is a view.
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
            function = _LinearCrossEntropy if reduction == "sum" else _TokenCrossEntropy
            apply: Callable[..., Tensor] = function.apply
            return apply(hidden_ND, weight_VD, targets_N, how, chunk, dtype)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        how = how._replace(z_loss=0.0)
        if reduction == "none":
            return _token_losses(hidden_ND, weight_VD, targets_N, how, chunk)
        loss = hidden_ND.new_zeros((), dtype=wide_dtype(hidden_ND))
        for rows in _slices(len(targets_N), chunk):
            logits_CV = hidden_ND[rows] @ weight_VD.T
            # Without gradients the logits are still turned into a gradient. A second code path
            # would save one pass over a block, which is in the cache, and could differ in its last
            # bits.
            loss += _total(_to_gradient(logits_CV, targets_N[rows], how))
        return loss


def chunk_rows(vocab_size: int, gpu_memory: int | None) -> int:
    """Return the tokens per chunk on a GPU with `gpu_memory` bytes of memory (None: on a CPU).

    It depends on the total memory, not on the free memory: results must not depend on other
    processes on the GPU.
    """
    if gpu_memory is None:
        return max(1, CHUNK_ELEMENTS // vocab_size)
    least, most = GPU_CHUNK_ELEMENTS
    allowed = int(GPU_CHUNK_SHARE * gpu_memory) // 2  # bytes of a bf16 logit
    # Rounded down to a power of two: GPUs of one model report slightly different totals, and the
    # order of sums must not depend on them.
    elements = min(most, max(least, 1 << (allowed.bit_length() - 1)))
    return max(1, elements // vocab_size // GPU_CHUNK_ROWS) * GPU_CHUNK_ROWS


def _gpu_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


class _How(NamedTuple):
    """Options of `linear_cross_entropy`."""

    softcap: float | None
    z_loss: float
    part: VocabularyPart | None
    fused: bool


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _blocks(logits_CV: Tensor) -> Iterator[slice]:
    """Yield the rows of each block of a chunk."""
    rows, columns = logits_CV.shape
    return _slices(rows, max(1, BLOCK_ELEMENTS[logits_CV.device.type] // columns))


def _total(losses: list[Tensor]) -> Tensor:
    """Return the sum of the losses of all blocks, []: blocks are added one after the other."""
    total = losses[0].new_zeros(())
    for losses_B in losses:
        total += losses_B.sum()
    return total


def _token_losses(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, how: _How, chunk: int
) -> Tensor:
    """Return the loss of each token, [N], without gradients."""
    losses = [hidden_ND.new_zeros(0, dtype=wide_dtype(hidden_ND))]  # for N = 0
    for rows in _slices(len(targets_N), chunk):
        losses += _to_gradient(hidden_ND[rows] @ weight_VD.T, targets_N[rows], how)
    return torch.cat(losses)


def _to_gradient(logits_CV: Tensor, targets_C: Tensor, how: _How) -> list[Tensor]:
    """Replace logits, in place, by the gradient of their loss.

    Return the loss of each token, in blocks [B], 0 where it is ignored. Ignored tokens get a
    gradient too; the caller masks it out.
    """
    if not how.fused:
        blocks = _blocks(logits_CV)
        return [_block_to_gradient(logits_CV[rows], targets_C[rows], how) for rows in blocks]
    # Compiled passes over the complete chunk.
    statistics, gradient_ = _fused_passes()
    column_C1 = targets_C[:, None] - (0 if how.part is None else how.part.first)
    lse_C1, logit_C1 = statistics(logits_CV, column_C1, how.softcap)
    if how.part is not None:
        lse_C1, logit_C1 = _of_all_parts(how.part, lse_C1, logit_C1)
    gradient_(logits_CV, column_C1, lse_C1, how.softcap, how.z_loss)
    return [(lse_C1 - logit_C1)[:, 0].masked_fill(targets_C == IGNORE_INDEX, 0.0)]


def _block_to_gradient(logits_BV: Tensor, targets_B: Tensor, how: _How) -> Tensor:
    softcap, z_loss, part, _ = how
    dtype = wide_dtype(logits_BV)
    capped_BV = logits_BV
    if softcap is not None:
        # A new tensor: the slope of the cap needs the capped logits after `grad_BV` was changed.
        capped_BV = logits_BV.to(dtype).div_(softcap).tanh_().mul_(softcap)
    # softmax subtracts the largest logit first, so `exp` cannot overflow.
    grad_BV = torch.softmax(capped_BV, dim=1, dtype=dtype)
    # Computed from the largest logit alone: its probability is never too small for a logarithm.
    largest_B1 = capped_BV.amax(dim=1, keepdim=True)
    lse_B1 = largest_B1 - grad_BV.amax(dim=1, keepdim=True).log()
    wanted_B1 = targets_B[:, None] - (0 if part is None else part.first)
    # IGNORE_INDEX and targets of other shards are no columns of this shard. Clamping makes them
    # valid to gather, and `here` makes their contribution 0.
    column_B1 = wanted_B1.clamp(0, logits_BV.shape[1] - 1)
    here_B1 = (column_B1 == wanted_B1).to(dtype)
    logit_B1 = capped_BV.gather(1, column_B1).to(dtype)
    if part is not None:  # so far, lse covers only this shard
        whole_B1, logit_B1 = _of_all_parts(part, lse_B1, logit_B1 * here_B1)
        # Only logsumexp and the target's logit cross the network, 8 bytes per token, instead of the
        # logits. The factor exp(lse - whole) is at most 1.
        grad_BV.mul_((lse_B1 - whole_B1).exp_())
        lse_B1 = whole_B1
    # softmax * (1 + 2 z lse) - one_hot(target), times the slope of the cap, 1 - tanh^2
    if z_loss:
        grad_BV.mul_(1.0 + 2.0 * z_loss * lse_B1)
    grad_BV.scatter_add_(1, column_B1, -here_B1)
    if softcap is not None:
        grad_BV.mul_(capped_BV.div_(softcap).square_().neg_().add_(1.0))
    # The gradient takes the memory of the logits, in their dtype. A second [C, V] buffer would
    # double the peak.
    logits_BV.copy_(grad_BV)
    return (lse_B1 - logit_B1)[:, 0].masked_fill(targets_B == IGNORE_INDEX, 0.0)


def _of_all_parts(part: VocabularyPart, lse_B1: Tensor, logit_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp and the target's logit over the full vocabulary, [B, 1] each.

    `logit_B1` must be 0 where another rank holds the target's row.
    """
    each_PB2 = part.gather(torch.cat((lse_B1, logit_B1), dim=1))
    # At most one rank has a logit other than 0, so the sum is exact.
    return each_PB2[..., :1].logsumexp(dim=0), each_PB2[..., 1:].sum(dim=0)


@cache
def _fused_passes() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
    """Return `_statistics` and `_gradient_`, compiled."""
    return (
        compiler.compiled(_statistics, otherwise=_statistics_in_blocks),
        compiler.compiled(_gradient_, otherwise=_gradient_in_blocks_),
    )


def _statistics(
    logits_CV: Tensor, column_C1: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return logsumexp [C, 1] and the target's logit [C, 1], 0 for a target in another shard."""
    logits_CV = wide(logits_CV)
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    # A comparison and a sum instead of `gather`: the compiler fuses them with the logsumexp into
    # one pass over the chunk.
    logit_C1 = torch.where(column_V == column_C1, logits_CV, 0.0).sum(dim=1, keepdim=True)
    return logits_CV.logsumexp(dim=1, keepdim=True), logit_C1


def _gradient_(
    logits_CV: Tensor, column_C1: Tensor, lse_C1: Tensor, softcap: float | None, z_loss: float
) -> None:
    """Overwrite logits with (softmax * (1 + 2 z lse) - one_hot(target)) * slope of the soft cap.

    The one-hot target is a comparison with the column index, not a scatter, so that the compiler
    fuses everything into one pass.
    """
    capped_CV = wide(logits_CV)
    if softcap is not None:
        capped_CV = softcap * torch.tanh(capped_CV / softcap)
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    # Without a maximum: logits minus their logsumexp are at most 0.
    grad_CV = (capped_CV - lse_C1).exp() * (1.0 + 2.0 * z_loss * lse_C1)
    grad_CV = grad_CV - (column_V == column_C1).to(grad_CV.dtype)
    if softcap is not None:
        grad_CV = grad_CV * (1.0 - (capped_CV / softcap).square())
    logits_CV.copy_(grad_CV)


def _statistics_in_blocks(
    logits_CV: Tensor, column_C1: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute `_statistics` block by block: uncompiled, only one block is held in fp32."""
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
        """Return the loss; compute both gradients while each chunk's logits exist."""
        hidden, weight = hidden_ND.to(dtype), weight_VD.to(dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        sum_dtype = wide_dtype(hidden)
        loss = hidden.new_zeros((), dtype=sum_dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        for rows in _slices(len(targets_N), chunk):
            h_CD, targets_C = hidden[rows], targets_N[rows]
            ignored_C1 = (targets_C == IGNORE_INDEX)[:, None]
            grad_CV = h_CD @ weight.T  # the logits, so far
            loss += _total(_to_gradient(grad_CV, targets_C, how))
            # Ignored rows are zeroed in the narrow [C, D] factors, not in the wide gradient.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_CV @ weight).masked_fill_(ignored_C1, 0.0)
            if wants_weight:
                h_CD = h_CD.masked_fill(ignored_C1, 0.0)
                if grad_weight is None:
                    # The first chunk replaces a buffer of zeros: one pass over [V, D] in fp32 less.
                    grad_weight = (grad_CV.T @ h_CD).to(sum_dtype)
                elif h_CD.dtype == sum_dtype:
                    # addmm adds to fp32 within the product. torch's addmm takes one dtype, so a
                    # bf16 product needs a temporary [V, D] and one more pass.
                    grad_weight.addmm_(grad_CV.T, h_CD)
                else:
                    grad_weight += grad_CV.T @ h_CD
            del grad_CV  # free the chunk's memory before the next one
        # Gradients instead of inputs: the backward pass then only scales them. This needs N * D + V
        # * D numbers until then, and no logits.
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by that of the loss, in place: each is used only once."""
        (grad_loss,) = grad_outputs
        grads = (
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None)


class _TokenCrossEntropy(torch.autograd.Function):
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
        """Return the loss of each token, [N]."""
        # Inputs instead of gradients: see `linear_cross_entropy`. The weight is the parameter
        # itself, so no memory is added.
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.how, ctx.chunk, ctx.dtype = how, chunk, dtype
        return _token_losses(
            hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, how._replace(z_loss=0.0), chunk
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the logits again, and from them both gradients, weighted per token."""
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        hidden, weight = hidden_ND.to(ctx.dtype), weight_VD.to(ctx.dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        factor_N1 = grad_outputs[0].masked_fill(targets_N == IGNORE_INDEX, 0.0)[:, None]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            grad_weight = torch.zeros_like(weight, dtype=wide_dtype(weight))
        # The caller may run `backward` under autocast, which would cast again.
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(len(targets_N), ctx.chunk):
                h_CD, factor_C1 = hidden[rows], factor_N1[rows]
                grad_CV = h_CD @ weight.T
                _to_gradient(grad_CV, targets_N[rows], ctx.how)
                # As in _LinearCrossEntropy, rows are scaled in the narrow [C, D] factors.
                if grad_hidden is not None:
                    grad_hidden[rows] = (factor_C1 * (grad_CV @ weight)).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += grad_CV.T @ (factor_C1 * h_CD).to(h_CD.dtype)
                del grad_CV  # free the chunk's memory before the next one
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_ND.dtype),
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            *(None,) * 4,
        )
