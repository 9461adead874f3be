"""Estimated peak memory of one device in a step, by part, in bytes.

Shapes: D dim, F ffn_dim, Q = heads * head_dim, K = key/value heads * head_dim, H heads, V
vocabulary, N the tokens of a forward pass on one device. Sizes of an element in bytes: e in the
compute dtype, which is that of the residual stream, and w of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from dtt.estimate import optimizer_cost
from dtt.estimate.activations import (
    activations,
    kept_again,
    kept_by_block,
    norm,
    other_passes,
    received,
    wide_layernorm,
)  # fmt: skip
from dtt.estimate.case import EMBEDDINGS, FP32, Case, Weight, numbers
from dtt.estimate.communication import bytes_gathered
from dtt.model.contract import Model
from dtt.model.loss import BLOCK_ELEMENTS, chunk_rows
from dtt.optim import eight_bit
from dtt.optim.adamw_optimizers import CHUNK

GIB = 2**30
OVERHEAD = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""Bytes that a process takes before it holds a tensor: on a GPU the CUDA context and the buffers of
cuBLAS and NCCL, on a CPU Python and torch."""
SPARE = {"cuda": 0.05, "cpu": 0.1}
"""Fraction of the device's memory that must stay free: for fragmentation and, on a CPU, for the
system."""
MODELS = "models of the objective"
"""Name of the part that is held for its frozen models."""
RESTORED = 16
"""Bytes for each weight of a chunk whose moments of 8 bits are restored, traced: both moments, and
two temporary numbers. A weight in bf16 has an fp32 copy as well."""
BATCHES = 4
"""Batches of a step held at once: the current one, and the prefetched ones."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory held at one moment of a step, by part, in bytes."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def fits(case: Case) -> bool:
    """Return True if the peak leaves the share `SPARE` of the device's memory free."""
    return memory(case).total <= (1 - SPARE[case.gpu.kind]) * case.gpu.memory


def memory(case: Case) -> MemoryEstimate:
    """Return the memory at the moment of the peak, of the rank of a pipeline that needs most."""
    return max(by_rank(case), key=lambda one: one.total)


def by_rank(case: Case) -> list[MemoryEstimate]:
    """Return the memory at the moment of the peak, of each rank of a pipeline."""
    ranks = map(case.of_rank, range(case.sizes.pipeline))
    return [max(moments(rank), key=lambda one: one.total) for rank in ranks]


def moments(case: Case) -> list[MemoryEstimate]:
    """Return the memory at each moment that can be the peak.

    Weights, optimizer state and EMA are there all the time. Activations grow through the forward
    pass; in the backward pass they shrink while gradients grow, so that their sum is largest at one
    of its ends. The peak is therefore at the loss, in the first or last blocks of the backward
    pass, at its end, or in the optimizer's step. In a pipeline, these passes are those of any of
    the rank's stages, while other micro-batches wait for theirs.
    """
    always = persistent(case)
    found: dict[str, dict[str, int]] = {}
    ranks = case.sizes.pipeline
    for stage in range(case.rank, len(case.stages), ranks):
        of_stage = case.of_stage(stage)
        named = f", stage {stage}" if ranks > 1 else ""
        for moment, parts in _of_a_pass(of_stage, last=True).items():
            found[moment + named] = parts
        if ranks > 1:
            for moment, parts in _of_a_pass(of_stage, last=False).items():
                found[f"{moment}{named}, before"] = parts
    found["the optimizer's step"] = _in_the_step(case)
    return [MemoryEstimate(moment, always | parts) for moment, parts in found.items()]


def _of_a_pass(case: Case, *, last: bool) -> dict[str, dict[str, int]]:
    """Return the memory at each moment of the passes of a stage; `last`: those that end a step."""
    second, end = min(1, case.blocks - 1), max(0, case.blocks - 2)
    found = {
        "the loss": _at_the_loss(case),
        "the backward pass": _in_the_backward_pass(case, 0, last=last),
        "the backward pass, then": _in_the_backward_pass(case, second, last=last),
        "the backward pass, at last": _in_the_backward_pass(case, max(second, end), last=last),
        "the embedding's gradient": _at_the_embedding(case, last=last),
    }
    if last:
        found["the end of the backward pass"] = _after_the_backward_pass(case)
    if case.sizes.pipeline > 1:
        others = other_passes(case, last=last)
        for parts in found.values():
            parts["activations"] = parts.get("activations", 0) + others
    return found


def persistent(case: Case) -> dict[str, int]:
    """Return the memory held from the first step to the last, by part."""
    held = case.held(case.trained)
    parts = {
        "parameters": round(sum(w.itemsize * case.held([w]) for w in case.weights)),
        "optimizer state": optimizer_cost.optimizer_state(case),
        "batches": BATCHES * 16 * case.sequences * case.cfg.train.seq_len,
        "framework": OVERHEAD[case.gpu.kind],
    }
    if (size := received(case)) > 0:
        parts["received hidden states"] = size
    if case.cfg.train.ema_decay is not None:
        parts["average of the weights"] = FP32 * held
    if case.models:
        parts[MODELS] = sum(
            _held(weight, case.spread) for m in case.models for weight in m.parameters()
        )
    return parts


def _held(weight: Tensor, spread: int) -> int:
    """Return the bytes of a frozen weight on one device: FSDP2 cuts the first dimension."""
    rows, *others = weight.shape
    held: int = weight.element_size() * -(-rows // spread) * prod(others)
    return held


def _called(case: Case, model: Model) -> int:
    """Return the bytes that a call of a frozen model takes, at most at its end.

    These are its logits with a copy in fp32, or two gathered blocks, and what is gathered of the
    rest. Of its hidden states, no more than those of a block are there.
    """
    blocks = [_bytes(block) for block in model.blocks().values()]
    gathered = case.spread > 1
    outside = _bytes(model) - sum(blocks) if gathered else 0
    logits: int = (case.product_bytes + FP32) * case.tokens * model.arch.vocab_size
    return outside + max(logits, 2 * max(blocks) if gathered else 0)


def _bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _loss(case: Case) -> tuple[int, int]:
    """Return the bytes that the loss keeps for the backward pass, and its temporary bytes.

    It keeps its gradients: 4VD of the head, in fp32, unless it is frozen, and eND of the hidden
    states. The temporary
    bytes are the hidden states and the logits of a chunk in e, which become their gradient, and in
    addition the larger of a block of logits in fp32 (on a CPU in bf16, twice that: the logits are
    copied first) and the chunk's gradient of the head in e, unless that is accumulated in place.
    """
    arch, n, e = case.arch, case.tokens, case.product_bytes
    rows = arch.vocab_size // case.sizes.tensor
    on_gpu = case.gpu.kind == "cuda"
    if case.cfg.objective.needs == "logits":
        # A loss of a user's own: all logits, their copy in fp32, and the gradients of both.
        return 0, 2 * (e + FP32) * n * rows
    logits = min(n, chunk_rows(rows, case.gpu.memory if on_gpu else None)) * rows
    trained = case.head.trained
    left = (FP32 * rows * arch.dim if trained else 0) + e * n * arch.dim
    # Compiled for a GPU, the kernel never stores a block of logits in fp32.
    wide = 0 if on_gpu and case.compiled else FP32 * min(logits, BLOCK_ELEMENTS[case.gpu.kind])
    if case.gpu.kind == "cpu" and e < FP32:
        wide *= 2
    narrow = e * rows * arch.dim if e < FP32 and trained else 0
    hidden = n * arch.dim * (FP32 + e if wide_layernorm(case) else case.product_bytes)
    return left, hidden + e * logits + max(wide, narrow)


def _casts(case: Case, done: int) -> int:
    """Return the bytes of blocks' weights in the compute dtype that autocast keeps.

    The graph keeps them: of compiled blocks until their backward pass, which `done` blocks have
    finished; uncompiled, one cast may belong to several graphs, and all are kept to the end. With
    remat, compiled blocks cast again. FSDP2 all-gathers weights in that dtype, and casts nothing.
    """
    if not case.autocast or case.sizes.sharded:
        return 0
    # Weights in 4 bits are decoded again for each product.
    cast = (
        w
        for w in case.block
        if len(w.part) > 1 and w.itemsize != case.product_bytes and not w.quantized
    )
    block = case.product_bytes * numbers(cast)
    if not case.compiled:
        return block * case.blocks
    left = case.blocks - done
    return block * (left if case.cfg.train.remat == "none" else 0)


def _gathered(case: Case, blocks: int, outside: Sequence[Weight] | None = None) -> int:
    """Return the bytes of weights that FSDP2 has all-gathered.

    These are `outside`, by default those of the root group, and those of `blocks` blocks, or of all
    blocks if they are not resharded after the forward pass.
    """
    if not case.sizes.sharded:
        return 0
    if not case.cfg.parallel.reshard:
        blocks = max(blocks, case.own_blocks)
    outside = case.in_root if outside is None else outside
    return bytes_gathered(case, outside) + blocks * bytes_gathered(case, case.block)


def _kept_gradients(case: Case) -> int:
    """Return the bytes of gradients held before the last backward pass of a step.

    They are the sums over earlier micro-batches. FSDP2 keeps them unsharded until the last one,
    unless they are reduced after each (`Case.reduces_each`). DDP's buckets are allocated all the
    time, and hold no gradients before the last micro-batch.
    """
    if case.keeps_whole_gradients:
        return _whole(case, case.trained)
    if case.sizes.sharded:
        return FP32 * case.held(case.trained) if case.accumulation > 1 else 0
    copies = (case.accumulation > 1) + (case.devices > 1)
    return copies * case.weight_bytes * numbers(case.trained)


def _whole(case: Case, weights: Sequence[Weight]) -> int:
    """Return the bytes of gradients that are summed before they are reduced.

    With tensor parallelism that of the embedding has all rows until then.
    """
    size = FP32 * numbers(weights)
    for weight in weights:
        if weight.name.startswith(EMBEDDINGS):
            size += FP32 * (weight.numel - prod(weight.part))
    return size


def _at_the_loss(case: Case) -> dict[str, int]:
    if not case.last:
        return {}
    left, meanwhile = _loss(case)
    # FSDP2 keeps the buffer of its last all-gather until the next: that of an untied head, or of a
    # block. (Of a group of one parameter, that is a copy of it.)
    buffer = [w for w in case.outside if w not in case.in_root]
    gathered = _gathered(case, 0 if buffer else 1, [*case.outside, *buffer])
    # The loss casts the head itself, and keeps its gradient in place of the cast.
    cast = case.head.itemsize != case.product_bytes and not case.sizes.sharded
    head = case.product_bytes * case.arch.vocab_size * case.arch.dim if cast else 0
    return {
        "gathered parameters": gathered + _casts(case, 0) + head,
        "gradients": _kept_gradients(case),
        "activations": activations(case, case.blocks)
        + case.tokens * norm(case, case.arch.dim) // case.sizes.tensor,
        "loss": left + meanwhile + sum(_called(case, model) for model in case.models),
    }


def _in_the_backward_pass(case: Case, done: int, *, last: bool) -> dict[str, int]:
    """Return the memory in the backward pass of a block, when `done` blocks are finished.

    The working memory is the gradients of the residual stream, of the MLP's product and of its two
    factors (compiled, that of gelu is computed in place) and, with remat, the recomputed
    activations of the block. FSDP2 has prefetched the next block in backward order, and
    reduce-scatters the gradients of the previous one, or of an untied head, in fp32, if this is the
    `last` micro-batch.
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = activations(case, case.blocks - done)
    factors = 1 if case.compiled and arch.mlp == "gelu" else 3
    if case.adapter:
        # Traced: the gradients of gate, up and their product that come through A are separate.
        factors += 4
    working = n * (case.product_bytes * arch.dim + factors * e * arch.mlp_width) // t
    # Weights in 4 bits are decoded for products: compiled, those of a whole block before its first
    # (traced); else each by itself, in fp32, and then in the compute dtype.
    four_bits = [weight.numel for weight in case.block if weight.quantized]
    if case.compiled:
        working += e * sum(four_bits)
    else:
        working += (e + FP32) * max(four_bits, default=0)
    if case.cfg.train.remat != "none":
        working += max(0, kept_by_block(case) - kept_again(case))
    size = case.product_bytes if case.sizes.sharded else case.weight_bytes
    head = size * arch.vocab_size // t * arch.dim if case.head.trained and case.last else 0
    trained = [weight for weight in case.block if weight.trained]
    untied = _untied_head(case)
    reduced = last or case.reduces_each
    sent = FP32 * numbers(trained if done else untied) if case.sizes.sharded and reduced else 0
    new = done * case.weight_bytes * case.held(trained)
    if untied:
        head, new = 0, new + case.weight_bytes * case.held(untied)
    summed = _kept_gradients(case)
    if case.keeps_whole_gradients and last:  # those of finished groups are in the buffers
        summed -= FP32 * (done * numbers(trained) + numbers(untied))
    return {
        "gathered parameters": _gathered(case, 2) + _casts(case, done),
        "gradients": max(summed, new) + head,
        "activations": kept + working,
        "exchange buffers": sent,
    }


def _untied_head(case: Case) -> list[Weight]:
    """Return the trained head that is a group of FSDP2, or an empty list."""
    if not case.sizes.sharded:
        return []
    return [weight for weight in case.outside if weight.trained and weight not in case.in_root]


def _of_blocks(case: Case) -> int:
    """Return the bytes of gradients under FSDP2 when the backward pass has finished all blocks.

    These are the reduced gradients of blocks and of an untied head and, for the weights in the root
    group, the sums over earlier micro-batches.
    """
    groups = [*_untied_head(case), *(weight for weight in case.trained if weight.in_block)]
    there = FP32 * sum(case.held([weight]) for weight in groups)
    outside = [weight for weight in case.in_root if weight.trained]
    if case.keeps_whole_gradients:
        return there + _whole(case, outside)
    return there + (FP32 * case.held(outside) if case.accumulation > 1 else 0)


def _at_the_embedding(case: Case, *, last: bool) -> dict[str, int]:
    """Return the memory at the gradient of the embedding, under FSDP2.

    The weights of the root group are still gathered, and their gradients unsharded. The gradient of
    a tied embedding is added to that of the head. With tensor parallelism, each device first has
    the embedding's gradient for all rows, then takes its own rows, or adds up all of them. FSDP2 is
    still reduce-scattering the gradients of the first block.
    """
    if not case.sizes.sharded or not case.head.trained or not case.first:
        return {}
    rows = case.arch.vocab_size
    own, tied = rows // case.sizes.tensor, case.arch.tie_embeddings
    added = case.arch.dim * ((rows if own < rows else 0) + (2 * own if tied else 0))
    if case.keeps_whole_gradients and own < rows:
        added -= own * case.arch.dim
    summed = _of_blocks(case) if last else _kept_gradients(case)
    return {
        "gathered parameters": _gathered(case, 0),
        "gradients": summed + case.product_bytes * (numbers(case.in_root) + added),
        "exchange buffers": FP32 * numbers(case.block) if last else 0,
    }


def _after_the_backward_pass(case: Case) -> dict[str, int]:
    """Return the memory at the end of the backward pass.

    FSDP2 reduce-scatters the gradients of the root group, in fp32. Otherwise all gradients are
    there, that of a tied embedding twice, because it is added to that of the head.
    """
    arch = case.arch
    if case.sizes.sharded:
        outside = numbers(weight for weight in case.in_root if weight.trained)
        new = 0 if case.keeps_whole_gradients else case.product_bytes * outside
        return {"gradients": _of_blocks(case) + new, "exchange buffers": FP32 * outside}
    tied = arch.tie_embeddings and case.head.trained
    again = case.weight_bytes * arch.vocab_size * arch.dim if tied else 0
    return {
        "gathered parameters": _casts(case, arch.n_layers),
        "gradients": case.weight_bytes * numbers(case.trained) + again,
    }


def _in_the_step(case: Case) -> dict[str, int]:
    """Return the memory in the optimizer's step.

    Fused AdamW needs no buffers, and its cautious decay one of the size of a parameter. With state
    of 8 bits it restores the moments of some rows at a time. Muon's step comes first, so that only
    one of the optimizers holds buffers at a time.
    """
    gradients = case.weight_bytes * case.held(case.trained)
    cautious = [w for w in case.weights if w.cautious and w.optimizer == "adamw"]
    adamw = case.weight_bytes * max((case.held([weight]) for weight in cautious), default=0)
    small = [case.held([w]) for w in case.weights if w.optimizer == eight_bit.NAME]
    chunk = (RESTORED + (case.weight_bytes < FP32) * FP32) * min(CHUNK, max(small, default=0))
    # It comes last: the gradients of AdamW's other parameters are gone.
    gone = case.weight_bytes * case.held(w for w in case.weights if w.optimizer == "adamw")
    adamw = max(adamw, chunk - gone)
    muon = optimizer_cost.buffers(case)
    buffers = {"AdamW's buffers": adamw} if adamw > muon else {"Muon's buffers": muon}
    return {"gradients": gradients, **buffers}
