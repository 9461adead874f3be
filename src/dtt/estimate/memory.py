"""Estimated peak memory of one device in a step, by part, in bytes.

Shapes: D dim, F ffn_dim, Q = heads * head_dim, K = key/value heads * head_dim, H heads, V
vocabulary, N the tokens of a forward pass on one device. Sizes of an element in bytes: e in the
compute dtype, r in the residual stream, w of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dtt.config.adapter import LoraConfig
from dtt.estimate import muon_cost
from dtt.estimate.case import Case, numbers
from dtt.model import count
from dtt.model.adapted_layers import adapted_layers, inner
from dtt.model.loss import BLOCK_ELEMENTS, chunk_rows

FP32 = 4
GIB = 2**30
OVERHEAD = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""Bytes that a process takes before it holds a tensor: on a GPU the CUDA context and the buffers of
cuBLAS and NCCL, on a CPU Python and torch."""
SPARE = {"cuda": 0.05, "cpu": 0.1}
"""Fraction of the device's memory that must stay free: for fragmentation and, on a CPU, for the
system."""
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
    """Return the memory at the moment of the peak."""
    return max(moments(case), key=lambda one: one.total)


def moments(case: Case) -> list[MemoryEstimate]:
    """Return the memory at each moment that can be the peak.

    Weights, optimizer state and EMA are there all the time. Activations grow through the forward
    pass; in the backward pass they shrink while gradients grow, so that their sum is largest at one
    of its ends. The peak is therefore at the loss, in the first or last blocks of the backward
    pass, at its end, or in the optimizer's step.
    """
    always, last = persistent(case), case.arch.n_layers - 2
    return [
        MemoryEstimate(moment, always | parts)
        for moment, parts in {
            "the loss": _at_the_loss(case),
            "the backward pass": _in_the_backward_pass(case, 0),
            "the backward pass, then": _in_the_backward_pass(case, 1),
            "the backward pass, at last": _in_the_backward_pass(case, max(1, last)),
            "the embedding's gradient": _at_the_embedding(case),
            "the end of the backward pass": _after_the_backward_pass(case),
            "the optimizer's step": _in_the_step(case),
        }.items()
    ]


def persistent(case: Case) -> dict[str, int]:
    """Return the memory held from the first step to the last, by part."""
    held = case.held(case.trained)
    parts = {
        "parameters": sum(weight.itemsize * case.held([weight]) for weight in case.weights),
        "optimizer state": optimizer_state(case),
        "batches": BATCHES * 16 * case.sequences * case.cfg.train.seq_len,
        "framework": OVERHEAD[case.gpu.kind],
    }
    if case.cfg.train.ema_decay is not None:
        parts["average of the weights"] = FP32 * held
    return parts


def optimizer_state(case: Case) -> int:
    """Return the bytes of optimizer state on one device.

    AdamW keeps two moments per weight, Muon one, NorMuon another number per row, and hyperball the
    norm of a matrix in each row.
    """
    muon = case.held(case.muons)
    adamw = case.held(case.trained) - muon
    rows = sum(-(-weight.part[0] // case.spread) for weight in case.muons)
    return case.weight_bytes * (2 * adamw + muon + _numbers_per_row(case) * rows)


def _numbers_per_row(case: Case) -> int:
    """Return the numbers that Muon keeps for each row of a matrix."""
    if case.muon is None:
        return 0
    return (case.muon.normuon_beta2 is not None) + (case.muon.scale == "hyperball")


def checkpoint_bytes(case: Case) -> int:
    """Return the bytes of a checkpoint: weights, optimizer state and EMA of the whole model.

    The step counts that AdamW keeps are too small to count.
    """
    adamw = sum(prod(w.shape) for w in case.weights if w.optimizer == "adamw")
    muon = sum(prod(w.shape) for w in case.muons)
    rows = _numbers_per_row(case) * sum(w.shape[0] for w in case.muons)
    average = FP32 * (adamw + muon) if case.cfg.train.ema_decay is not None else 0
    return case.weight_bytes * (3 * adamw + 2 * muon + rows) + average


def checkpoints_at_once(case: Case) -> int:
    """Return the maximum number of checkpoints on disk: those kept, and one being written."""
    rules = case.cfg.checkpoint
    forever = case.steps // rules.keep_every if rules.keep_every else 0
    kept = rules.keep_last + rules.keep_best + forever
    return min(kept + 1, -(-case.steps // rules.every))


def kept_by_block(case: Case) -> int:
    """Return the bytes of activations that one block keeps for its backward pass, without remat.

    Autograd saves the inputs of each operation whose gradient needs them. Bytes per token:

        norm       its input (LayerNorm in r, RMSNorm in fp32) and, for torch's RMSNorm on a CPU,
                   the normalised input as well: 4D + 4D
        q, k, v    their input, eD; under autocast a copy for each, because each one casts it
        attention  q, k and v after rotation, the output, logsumexp: e(2Q + 2K) + 4H
        o          its input, the output of attention with heads concatenated: a copy, eQ, if
                   rotation has laid the output out by head
        MLP        its input as for q, k, v; eF for each of gate, up, silu(gate) and their product,
                   or for each of up and gelu(up)

    qk_norm adds norms of Q + K, sandwich norms two more norms of D. A compiled block recomputes
    norms and activation functions, which costs almost nothing, and keeps only the inputs and
    outputs of matrix products: the branch for `case.compiled` lists them. Under autocast, the casts
    of weights are kept as long as the graph, too: `_casts` counts those of the whole model.
    """
    arch, n, e, r = case.arch, case.tokens, case.product_bytes, case.stream_bytes
    t = case.sizes.tensor
    d, f = arch.dim, arch.ffn_dim // t
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    heads = arch.n_heads // t
    gated, rope = arch.mlp != "gelu", arch.position == "rope"
    gathered = k * case.sizes.context
    attention = e * (2 * q + 2 * gathered) + FP32 * heads + (e * q if rope else 0)
    adapter = n * _kept_by_adapter(case)
    if case.compiled:
        own = (
            r * d + e * d + (e * d if arch.norm_placement != "pre" else 0)
        )  # each device has n / t tokens
        whole = 2 * e * d + attention + e * f * (3 if gated else 2)
        whole += e * (q + k) if arch.qk_norm != "none" else 0
        return n * own // t + n * whole + adapter
    norms = (4 if arch.norm_placement == "sandwich" else 2) * _norm(case, d)
    copies = (3, 2 if gated else 1) if _cast_for_each(case) else (1, 1)
    whole = sum(copies) * e * d + attention + e * f * (4 if gated else 2)
    if arch.qk_norm != "none":
        whole += _norm(case, q + k, e)
    return n * norms // t + n * whole + adapter


def _kept_by_adapter(case: Case) -> int:
    """Return the bytes per token that the adapters of one block keep.

    They are the outputs of A, and with dropout its input, with one byte for each element that tells
    whether it was dropped. The input itself is there: W needs none, as it is frozen.
    """
    if not isinstance(case.cfg.adapter, LoraConfig):
        return 0
    shapes, kept = count.layer_shapes(case.arch), 0
    for name, adapted in adapted_layers(case.cfg.adapter, case.arch).items():
        if name.startswith("layers.0."):
            dropped = shapes[f"{inner(name)}.weight"][1] if case.cfg.adapter.dropout else 0
            kept += case.product_bytes * adapted.rank + (case.product_bytes + 1) * dropped
    return kept


def _norm(case: Case, width: int, size: int | None = None) -> int:
    """Return the bytes per token that a norm of `width` elements keeps.

    `size` is the size of an element in bytes; None: as in the residual stream.
    """
    size = size or case.stream_bytes
    if case.arch.norm == "layernorm":
        return (FP32 if _wide_layernorm(case) else size) * width + 2 * FP32
    # Its normalised input only for the gradient of its weight.
    copies = 2 if case.gpu.kind == "cpu" and not case.adapter else 1
    return FP32 * width * copies + FP32


def _cast_for_each(case: Case) -> bool:
    """Return True if norms return fp32 and autocast casts their output for each matrix product.

    With tensor parallelism it is cast once, before tokens are all-gathered.
    """
    return _wide_layernorm(case) and case.sizes.tensor == 1


def _wide_layernorm(case: Case) -> bool:
    """Return True if LayerNorm computes in fp32 for any input: under autocast, on a GPU."""
    return case.autocast and case.arch.norm == "layernorm" and case.gpu.kind == "cuda"


def _kept_again(case: Case) -> int:
    """Return the bytes of activations that a block with `train.remat` keeps.

    Full remat keeps the input of the block. Selective remat also keeps the outputs of attention, of
    every second matrix product (q, v, gate or up, down) and of collectives: tokens all-gathered
    twice and reduce-scattered twice (tensor parallelism), keys and values (context parallelism).
    The compiler drops the output of down, which no gradient needs.
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = n * case.stream_bytes * arch.dim // t
    if case.cfg.train.remat == "full":
        return kept
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    gated = arch.mlp != "gelu"
    products = q + k + arch.ffn_dim // t + (arch.dim if gated and not case.compiled else 0)
    exchanged = 2 * (arch.dim + arch.dim // t) if t > 1 else 0
    if case.sizes.context > 1:
        exchanged += 2 * k * case.sizes.context
    return kept + n * (e * (q + products + exchanged) + FP32 * arch.n_heads // t)


def _kept_both_times(case: Case) -> int:
    """Return the bytes counted both by `kept_by_block` and `_kept_again`.

    When remat recomputes a block, it has kept the block's input all along; selective remat also v,
    gate or up, the output of attention and the all-gathered tokens.
    """
    arch, t = case.arch, case.sizes.tensor
    both = case.tokens * case.stream_bytes * arch.dim // t if case.compiled else 0
    if case.cfg.train.remat != "selective":
        return both
    widths = (arch.n_heads + arch.n_kv_heads) * arch.head_dim + arch.ffn_dim
    whole = 2 * arch.dim if t > 1 else 0
    own = (case.product_bytes * widths + FP32 * arch.n_heads) // t
    return both + case.tokens * (own + case.product_bytes * whole)


def activations(case: Case, blocks: int) -> int:
    """Return the bytes of activations that the first `blocks` blocks keep."""
    kept = kept_by_block(case)
    if case.cfg.train.remat == "none":
        return blocks * kept
    again = _with_remat(case, blocks)
    return (blocks - again) * kept + again * min(kept, _kept_again(case))


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
    logits = min(n, chunk_rows(rows, case.gpu.memory if on_gpu else None)) * rows
    trained = case.head.trained
    left = (FP32 * rows * arch.dim if trained else 0) + e * n * arch.dim
    # Compiled for a GPU, the kernel never stores a block of logits in fp32.
    wide = 0 if on_gpu and case.compiled else FP32 * min(logits, BLOCK_ELEMENTS[case.gpu.kind])
    if case.gpu.kind == "cpu" and e < FP32:
        wide *= 2
    narrow = e * rows * arch.dim if e < FP32 and trained else 0
    hidden = n * arch.dim * (FP32 + e if _wide_layernorm(case) else case.stream_bytes)
    return left, hidden + e * logits + max(wide, narrow)


def _casts(case: Case, done: int) -> int:
    """Return the bytes of blocks' weights in the compute dtype that autocast keeps.

    The graph keeps them: of compiled blocks until their backward pass, which `done` blocks have
    finished; uncompiled, one cast may belong to several graphs, and all are kept to the end. With
    remat, compiled blocks cast again. FSDP2 all-gathers weights in that dtype, and casts nothing.
    """
    if not case.autocast or case.sizes.sharded:
        return 0
    cast = (w for w in case.block if len(w.part) > 1 and w.itemsize != case.product_bytes)
    block = case.product_bytes * numbers(cast)
    if not case.compiled:
        return block * case.arch.n_layers
    left = case.arch.n_layers - done
    return block * (left if case.cfg.train.remat == "none" else left - _with_remat(case, left))


def _with_remat(case: Case, blocks: int) -> int:
    """Return how many of the first `blocks` blocks use remat."""
    return -(-blocks // case.cfg.train.remat_every)


def _gathered(case: Case, blocks: int) -> int:
    """Return the bytes of weights that FSDP2 has all-gathered.

    These are the weights outside of blocks and those of `blocks` blocks, or of all blocks if they
    are not resharded after the forward pass.
    """
    if not case.sizes.sharded:
        return 0
    if not case.cfg.parallel.reshard:
        blocks = max(blocks, case.arch.n_layers)
    return case.product_bytes * (numbers(case.outside) + blocks * numbers(case.block))


def _kept_gradients(case: Case) -> int:
    """Return the bytes of gradients held before the last backward pass of a step.

    They are the sums over earlier micro-batches. FSDP2 keeps them unsharded until the last one,
    unless `parallel.reduce=each`. DDP's buckets are allocated all the time, and hold no gradients
    before the last micro-batch.
    """
    if case.keeps_whole_gradients:
        return FP32 * numbers(case.trained)
    if case.sizes.sharded:
        return FP32 * case.held(case.trained) if case.accumulation > 1 else 0
    copies = (case.accumulation > 1) + (case.devices > 1)
    return copies * case.weight_bytes * numbers(case.trained)


def _at_the_loss(case: Case) -> dict[str, int]:
    left, meanwhile = _loss(case)
    # The loss casts the head itself, and keeps its gradient in place of the cast.
    cast = case.head.itemsize != case.product_bytes and not case.sizes.sharded
    head = case.product_bytes * case.arch.vocab_size * case.arch.dim if cast else 0
    return {
        "gathered parameters": _gathered(case, 1) + _casts(case, 0) + head,
        "gradients": _kept_gradients(case),
        "activations": activations(case, case.arch.n_layers)
        + case.tokens * _norm(case, case.arch.dim) // case.sizes.tensor,
        "loss": left + meanwhile,
    }


def _in_the_backward_pass(case: Case, done: int) -> dict[str, int]:
    """Return the memory in the backward pass of a block, when `done` blocks are finished.

    The working memory is the gradients of the residual stream, of the MLP's product and of its two
    factors (compiled, that of gelu is computed in place) and, with remat, the recomputed
    activations of the block. FSDP2 has prefetched the next block in backward order, and
    reduce-scatters the gradients of the previous one, in fp32.
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = activations(case, case.arch.n_layers - done)
    factors = 1 if case.compiled and arch.mlp == "gelu" else 3
    if case.adapter:
        # Traced: the gradients of gate, up and their product that come through A are separate.
        factors += 4
    working = n * (case.stream_bytes * arch.dim + factors * e * arch.ffn_dim) // t
    if case.cfg.train.remat != "none":
        working += kept_by_block(case) - _kept_both_times(case)
    size = case.product_bytes if case.sizes.sharded else case.weight_bytes
    head = size * arch.vocab_size // t * arch.dim if case.head.trained else 0
    trained = [weight for weight in case.block if weight.trained]
    sent = FP32 * numbers(trained) if case.sizes.sharded and done else 0
    new = done * case.weight_bytes * case.held(trained)
    return {
        "gathered parameters": _gathered(case, 2) + _casts(case, done),
        "gradients": max(_kept_gradients(case), new) + head,
        "activations": kept + working,
        "exchange buffers": sent,
    }


def _of_blocks(case: Case) -> int:
    """Return the bytes of gradients under FSDP2 when the backward pass has finished all blocks.

    These are the reduced gradients of blocks and, for the weights outside of blocks, the sums over
    earlier micro-batches.
    """
    there = FP32 * sum(case.held([weight]) for weight in case.trained if weight.in_block)
    outside = [weight for weight in case.outside if weight.trained]
    if case.keeps_whole_gradients:
        return there + FP32 * numbers(outside)
    return there + (FP32 * case.held(outside) if case.accumulation > 1 else 0)


def _at_the_embedding(case: Case) -> dict[str, int]:
    """Return the memory at the gradient of the embedding, under FSDP2.

    The weights outside of blocks are still gathered, and their gradients unsharded. The gradient of
    a tied embedding is added to that of the head. With tensor parallelism, each device first has
    the embedding's gradient for all rows, then takes its own rows. FSDP2 is still reduce-scattering
    the gradients of the first block.
    """
    if not case.sizes.sharded or not case.head.trained:
        return {}
    rows = case.arch.vocab_size
    own, tied = rows // case.sizes.tensor, case.arch.tie_embeddings
    added = case.arch.dim * ((rows if own < rows else 0) + (2 * own if tied else 0))
    return {
        "gathered parameters": _gathered(case, 0),
        "gradients": _of_blocks(case) + case.product_bytes * (numbers(case.outside) + added),
        "exchange buffers": FP32 * numbers(case.block),
    }


def _after_the_backward_pass(case: Case) -> dict[str, int]:
    """Return the memory at the end of the backward pass.

    FSDP2 reduce-scatters the gradients outside of blocks, in fp32. Otherwise all gradients are
    there, that of a tied embedding twice, because it is added to that of the head.
    """
    arch = case.arch
    if case.sizes.sharded:
        outside = numbers(weight for weight in case.outside if weight.trained)
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

    Fused AdamW needs no buffers, and its cautious decay one of the size of a parameter. Muon's step
    comes first, so that only one of the two holds buffers at a time.
    """
    gradients = case.weight_bytes * case.held(case.trained)
    cautious = [w for w in case.weights if w.cautious and w.optimizer == "adamw"]
    adamw = case.weight_bytes * max((case.held([weight]) for weight in cautious), default=0)
    muon = muon_cost.buffers(case)
    buffers = {"AdamW's buffers": adamw} if adamw > muon else {"Muon's buffers": muon}
    return {"gradients": gradients, **buffers}
