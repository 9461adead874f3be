"""What one device holds at the worst moment of a step, by part, in bytes.

Shapes: D dim, F ffn_dim, Q = heads * head_dim, K = key/value heads * head_dim, V vocabulary, N the
tokens of a forward pass on one device. e is the size of a number in products, r of one in the
residual stream, w of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dtt.model.loss import BLOCK_ELEMENTS, chunk_rows
from dtt.train.estimate import muon
from dtt.train.estimate.case import Case, numbers

FP32 = 4
GIB = 2**30
OVERHEAD = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""Of a process before it holds a tensor: on a GPU the context and the buffers of cuBLAS and NCCL,
on a CPU Python and torch."""
SPARE = {"cuda": 0.05, "cpu": 0.1}
"""Share of the device's memory that must stay free: what lies between tensors is lost, and on a
CPU there is a system, too."""
BATCHES = 4
"""Of a step that are there at once: the current one, and those that are made ahead."""


@dataclass(frozen=True)
class Memory:
    """The parts at the worst moment; their sum is the peak."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())


def fits(case: Case) -> bool:
    """Whether the peak leaves the device what it needs."""
    return memory(case).total <= (1 - SPARE[case.gpu.kind]) * case.gpu.memory


def memory(case: Case) -> Memory:
    """The worst of the moments."""
    return max(moments(case), key=lambda one: one.total)


def moments(case: Case) -> list[Memory]:
    """The loss, the backward pass of the last block, its end, the optimizer's step.

    Weights, optimizer state and average are there all the time. Activations grow through the
    forward pass, gradients through the backward pass, as activations go: in between both are less
    than at one of its ends. So the peak is at one of these moments.
    """
    always, last = persistent(case), case.arch.n_layers - 2
    return [
        Memory(moment, always | parts)
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
    """What is there from the first step to the last."""
    held = case.held(case.weights)
    parts = {
        "parameters": case.weight_bytes * held,
        "optimizer state": optimizer_state(case),
        "batches": BATCHES * 16 * case.sequences * case.cfg.train.seq_len,
        "framework": OVERHEAD[case.gpu.kind],
    }
    if case.cfg.train.ema_decay is not None:
        parts["average of the weights"] = FP32 * held
    return parts


def optimizer_state(case: Case) -> int:
    """AdamW keeps two moments of every weight; Muon one, and NorMuon a number for each row."""
    muon = case.held(case.muons)
    adamw = case.held(case.weights) - muon
    rows = 0
    if _normuon(case):
        rows = sum(-(-weight.part[0] // case.spread) for weight in case.muons)
    return case.weight_bytes * (2 * adamw + muon + rows)


def _normuon(case: Case) -> bool:
    return case.muon is not None and case.muon.normuon_beta2 is not None


def checkpoint_bytes(case: Case) -> int:
    """Weights, optimizer state and average, of the whole model; AdamW also counts its steps."""
    adamw = sum(prod(w.shape) for w in case.weights if w.optimizer == "adamw")
    muon = sum(prod(w.shape) for w in case.muons)
    rows = sum(w.shape[0] for w in case.muons) if _normuon(case) else 0
    average = FP32 * (adamw + muon) if case.cfg.train.ema_decay is not None else 0
    return case.weight_bytes * (3 * adamw + 2 * muon + rows) + average


def checkpoints_at_once(case: Case) -> int:
    """Most that there ever are: those that rules keep, and one that is being written."""
    rules = case.cfg.checkpoint
    forever = case.steps // rules.keep_every if rules.keep_every else 0
    kept = rules.keep_last + rules.keep_best + forever
    return min(kept + 1, -(-case.steps // rules.every))


def kept_by_block(case: Case) -> int:
    """Activations that one block keeps for its backward pass, bytes; nothing is recomputed.

    What autograd keeps is the inputs of each operation whose gradient needs them:

        norm       its input (LayerNorm in r, RMSNorm in fp32) and, of torch's RMSNorm on a CPU,
                   the normed input, too: 4D + 4D
        q, k, v    their input, eD; under autocast a copy for each, as it casts for each
        attention  q, k and v after rotation, the output, logsumexp: e(2Q + 2K) + 4H
        o          its input: the output of attention with heads side by side, a copy where
                   rotation has laid it out by head: eQ
        MLP        its input as with q, k, v; F times e of gate, up, silu(gate) and their product,
                   or of up and gelu(up)

    With qk_norm and sandwich norms there are norms of Q + K, and of D twice more. A compiled block
    computes norms and activations again, which costs next to nothing, and keeps what products gave
    and take: rD + e(5D + 2Q...), of which the formulas below are the list. Under autocast the
    weights' casts are kept, too, as long as the graph is: those of the whole model are counted in
    `_casts`.
    """
    arch, n, e, r = case.arch, case.tokens, case.product_bytes, case.stream_bytes
    t = case.sizes.tensor
    d, f = arch.dim, arch.ffn_dim // t
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    heads = arch.n_heads // t
    gated, rope = arch.mlp != "gelu", arch.position == "rope"
    gathered = k * case.sizes.context
    attention = e * (2 * q + 2 * gathered) + FP32 * heads + (e * q if rope else 0)
    if case.compiled:
        own = r * d + e * d + (e * d if arch.sandwich_norm else 0)  # of a share of the tokens
        whole = 2 * e * d + attention + e * f * (3 if gated else 2)
        return n * own // t + n * (whole + (e * (q + k) if arch.qk_norm else 0))
    norms = (4 if arch.sandwich_norm else 2) * _norm(case, d)
    copies = (3, 2 if gated else 1) if _cast_for_each(case) else (1, 1)
    whole = sum(copies) * e * d + attention + e * f * (4 if gated else 2)
    if arch.qk_norm:
        whole += _norm(case, q + k, e)
    return n * norms // t + n * whole


def _norm(case: Case, width: int, size: int | None = None) -> int:
    """Bytes that a norm of `width` numbers (of `size` bytes; as the stream) keeps for a token."""
    size = size or case.stream_bytes
    if case.arch.norm == "layernorm":
        return (FP32 if _wide_layernorm(case) else size) * width + 2 * FP32
    return FP32 * width * (2 if case.gpu.kind == "cpu" else 1) + FP32


def _cast_for_each(case: Case) -> bool:
    """Whether norms give fp32 where products take bf16: autocast then casts for each product.

    Tensor parallelism casts once, before tokens are gathered.
    """
    return _wide_layernorm(case) and case.sizes.tensor == 1


def _wide_layernorm(case: Case) -> bool:
    """Whether LayerNorm works in fp32 whatever it gets: under autocast, on a GPU."""
    return case.autocast and case.arch.norm == "layernorm" and case.gpu.kind == "cuda"


def _kept_again(case: Case) -> int:
    """Activations of a block that `train.remat` applies to: its input; if selective also what
    attention, every second product (q, v, gate or up, down) and exchanges give: tokens gathered
    twice and reduce-scattered twice (tensor parallelism), keys and values (context parallelism).
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = n * case.stream_bytes * arch.dim // t
    if case.cfg.train.remat == "full":
        return kept
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    gated = arch.mlp != "gelu"
    products = q + k + arch.ffn_dim // t + (arch.dim if gated else 0)
    exchanged = 2 * (arch.dim + arch.dim // t) if t > 1 else 0
    if case.sizes.context > 1:
        exchanged += 2 * k * case.sizes.context
    return kept + n * (e * (q + products + exchanged) + FP32 * arch.n_heads // t)


def _kept_both_times(case: Case) -> int:
    """Of what a block keeps once it is computed again, what it has kept all along: with selective
    remat v, gate or up, what attention gave, and tokens that were gathered."""
    if case.cfg.train.remat != "selective":
        return 0
    arch, t = case.arch, case.sizes.tensor
    widths = (arch.n_heads + arch.n_kv_heads) * arch.head_dim + arch.ffn_dim
    whole = 2 * arch.dim if t > 1 else 0
    own = (case.product_bytes * widths + FP32 * arch.n_heads) // t
    return case.tokens * (own + case.product_bytes * whole)


def activations(case: Case, blocks: int) -> int:
    """What the first so many blocks keep."""
    kept = kept_by_block(case)
    if case.cfg.train.remat == "none":
        return blocks * kept
    again = -(-blocks // case.cfg.train.remat_every)
    return (blocks - again) * kept + again * min(kept, _kept_again(case))


def _loss(case: Case) -> tuple[int, int]:
    """What the loss leaves for the backward pass, and what it takes for itself meanwhile.

    Its gradients: of the head in fp32, 4VD, of the hidden states, eND. Meanwhile the logits of a
    chunk in e, which become their gradient; then a block of them in fp32 (on a CPU first a copy of
    the logits), or, in e, the chunk's part of the head's gradient, unless that is added up in one.
    """
    arch, n, e = case.arch, case.tokens, case.product_bytes
    rows = arch.vocab_size // case.sizes.tensor
    on_gpu = case.gpu.kind == "cuda"
    logits = min(n, chunk_rows(rows, case.gpu.memory if on_gpu else None)) * rows
    left = FP32 * rows * arch.dim + e * n * arch.dim
    # Compiled for a GPU, no block of logits is ever there in fp32.
    wide = 0 if on_gpu and case.compiled else FP32 * min(logits, BLOCK_ELEMENTS[case.gpu.kind])
    if case.gpu.kind == "cpu" and e < FP32:
        wide *= 2
    narrow = e * rows * arch.dim if e < FP32 else 0
    hidden = n * arch.dim * (FP32 + e if _wide_layernorm(case) else case.stream_bytes)
    return left, hidden + e * logits + max(wide, narrow)


def _casts(case: Case) -> int:
    """Weights in the type of products, which autocast keeps for a forward and backward pass; where
    FSDP2 gathers them they are in it already, and compiled blocks cast again."""
    if not case.autocast or case.sizes.sharded:
        return 0
    head = case.arch.vocab_size * case.arch.dim
    blocks = sum(prod(w.part) for w in case.weights if w.in_block and len(w.part) > 1)
    return case.product_bytes * (head + (0 if case.compiled else blocks))


def _gathered(case: Case, blocks: int) -> int:
    """Weights that FSDP2 has gathered: those outside of blocks and of so many blocks, or of all."""
    if not case.sizes.sharded:
        return 0
    if not case.cfg.parallel.reshard:
        blocks = max(blocks, case.arch.n_layers)
    return case.product_bytes * (numbers(case.outside) + blocks * numbers(case.block))


def _kept_gradients(case: Case) -> int:
    """Gradients that are there before the backward pass: of the micro-batches before, which FSDP2
    keeps whole until the last one, unless told otherwise; DDP's buffers are there all the time, and
    take no gradients before the last micro-batch's."""
    if case.keeps_whole_gradients:
        return FP32 * numbers(case.weights)
    if case.sizes.sharded:
        return FP32 * case.held(case.weights) if case.accumulation > 1 else 0
    copies = (case.accumulation > 1) + (case.devices > 1)
    return copies * case.weight_bytes * numbers(case.weights)


def _at_the_loss(case: Case) -> dict[str, int]:
    left, meanwhile = _loss(case)
    return {
        "gathered parameters": _gathered(case, 1) + _casts(case),
        "gradients": _kept_gradients(case),
        "activations": activations(case, case.arch.n_layers)
        + case.tokens * _norm(case, case.arch.dim) // case.sizes.tensor,
        "loss": left + meanwhile,
    }


def _in_the_backward_pass(case: Case, done: int) -> dict[str, int]:
    """When it comes to a block, and so many after that one are done.

    What it works with: the gradients of the residual stream, of the MLP's product and of its two
    factors, and all activations of the block, if they were computed again. FSDP2 has gathered the
    block before it, too, and sends the gradients of the one after it, in fp32.
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = activations(case, case.arch.n_layers - done)
    working = n * (case.stream_bytes * arch.dim + 3 * e * arch.ffn_dim) // t
    if case.cfg.train.remat != "none":
        working += kept_by_block(case) - _kept_both_times(case)
    head = (case.product_bytes if case.sizes.sharded else FP32) * arch.vocab_size // t * arch.dim
    sent = FP32 * numbers(case.block) if case.sizes.sharded and done else 0
    new = done * FP32 * case.held(case.block)
    return {
        "gathered parameters": _gathered(case, 2) + _casts(case),
        "gradients": max(_kept_gradients(case), new) + head,
        "activations": kept + working,
        "exchange buffers": sent,
    }


def _of_blocks(case: Case) -> int:
    """Gradients that FSDP2 has summed before it comes to those outside of blocks; of these what
    micro-batches before have left."""
    there = FP32 * sum(case.held([weight]) for weight in case.weights if weight.in_block)
    if case.keeps_whole_gradients:
        return there + FP32 * numbers(case.outside)
    return there + (FP32 * case.held(case.outside) if case.accumulation > 1 else 0)


def _at_the_embedding(case: Case) -> dict[str, int]:
    """What is outside of blocks is still gathered, and its gradients are whole. A tied embedding's
    is added to the head's; with tensor parallelism each device has that of all rows, before it
    takes its own of them. FSDP2 still sends those of the first block."""
    if not case.sizes.sharded:
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
    """FSDP2 sends the gradients outside of blocks, in fp32. Else all gradients are there, and that
    of a tied embedding a second time, as it is added to the head's."""
    arch = case.arch
    if case.sizes.sharded:
        outside = numbers(case.outside)
        new = 0 if case.keeps_whole_gradients else case.product_bytes * outside
        return {"gradients": _of_blocks(case) + new, "exchange buffers": FP32 * outside}
    again = FP32 * arch.vocab_size * arch.dim if arch.tie_embeddings else 0
    return {
        "gathered parameters": _casts(case),
        "gradients": case.weight_bytes * numbers(case.weights) + again,
    }


def _in_the_step(case: Case) -> dict[str, int]:
    """AdamW is fused and takes nothing."""
    gradients = case.weight_bytes * case.held(case.weights)
    return {"gradients": gradients, "Muon's buffers": muon.buffers(case)}
