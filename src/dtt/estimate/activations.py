"""Estimated bytes of the activations that autograd keeps for the backward pass.

Shapes as in `dtt.estimate.memory`. The passes of a pipeline come in the order of `Schedule1F1B` and
`ScheduleInterleaved1F1B` of torch.distributed.pipelining (Narayanan et al., 2021, arXiv
2104.04473).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dtt.config.adapter import LoraConfig
from dtt.estimate.built_models import kept_per_token
from dtt.estimate.case import FP32, Case
from dtt.model.adapted_layers import adaptable, adapted_layers
from dtt.model.architecture import ExpertMixture


def kept_by_block(case: Case) -> int:
    """Return the bytes of activations that one block keeps for its backward pass, without remat.

    Autograd saves the inputs of each operation whose gradient needs them. Bytes per token:

        norm       its input (LayerNorm in e, RMSNorm in fp32) and, for torch's RMSNorm on a CPU,
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
    arch, n, e = case.arch, case.tokens, case.product_bytes
    if case.built is not None:
        how = case.cfg.adapter, case.precision.compute_dtype, case.cfg.train.seq_len
        if (traced := kept_per_token(case.built, *how)) is not None:
            return round(n * traced)
    t = case.sizes.tensor
    d, f = arch.dim, arch.ffn_dim // t
    if arch.mixture is not None:
        return _kept_with_experts(case, arch.mixture)
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    heads = arch.n_heads // t
    gated, rope = arch.mlp != "gelu", arch.position == "rope"
    gathered = k * case.sizes.context
    attention = e * (2 * q + 2 * gathered) + FP32 * heads + (e * q if rope else 0)
    adapter = n * _kept_by_adapter(case)
    if case.compiled:
        # Each device has n / t tokens.
        own = 2 * e * d + (e * d if arch.norm_placement != "pre" else 0)
        whole = 2 * e * d + attention + e * f * (3 if gated else 2)
        whole += e * (q + k) if arch.qk_norm != "none" else 0
        return n * own // t + n * whole + adapter
    norms = (4 if arch.norm_placement == "sandwich" else 2) * norm(case, d)
    # Where norms return fp32, autocast casts their output for each matrix product; with tensor
    # parallelism once, before tokens are all-gathered.
    copies = 3 + (2 if gated else 1) if wide_layernorm(case) and t == 1 else 2
    whole = copies * e * d + attention + e * f * (4 if gated else 2)
    if arch.qk_norm != "none":
        whole += norm(case, q + k, e)
    return n * norms // t + n * whole + adapter


def _kept_with_experts(case: Case, mixture: ExpertMixture) -> int:
    """Return the bytes that a block with a mixture keeps; blocks with an ordinary MLP keep less.

    Beside what attention and norms keep, bytes per token of a mixture of K experts:

        router     its input in fp32, scores and logits: 4D + 8E
        rows       the input of the experts, sorted: eKD; under expert parallelism as received
        experts    gate, up, silu(gate), their product and that with the weights: 5eKF
        shared     its input, which is that of the router, and four of its width: 4eF
    """
    dense = replace(case.arch, mixture=None, ffn_dim=0)
    n, e, d, k = case.tokens, case.product_bytes, case.arch.dim, mixture.per_token
    mlp = FP32 * (d + 2 * mixture.experts) + e * k * (d + 5 * mixture.ffn_dim)
    mlp += 4 * e * mixture.shared_dim
    # Each tensor-parallel rank has its own tokens there.
    return kept_by_block(replace(case, arch=dense)) + n * mlp // case.sizes.tensor


def _kept_by_adapter(case: Case) -> int:
    """Return the bytes per token that the adapters of one block keep.

    They are the outputs of A, and with dropout its input, with one byte for each element that tells
    whether it was dropped. The input itself is there: W needs none, as it is frozen.
    """
    if not isinstance(case.cfg.adapter, LoraConfig):
        return 0
    shapes, kept = adaptable(case.model), 0
    for name, adapted in adapted_layers(case.cfg.adapter, case.model).items():
        if ".layers.0." in f".{name}":
            dropped = shapes[f"{name}.weight"][1] if case.cfg.adapter.dropout else 0
            kept += case.product_bytes * adapted.rank + (case.product_bytes + 1) * dropped
    return kept


def norm(case: Case, width: int, size: int | None = None) -> int:
    """Return the bytes per token that a norm of `width` elements keeps.

    `size` is the size of an element in bytes; None: as in the residual stream.
    """
    size = size or case.product_bytes
    if case.arch.norm == "layernorm":
        return (FP32 if wide_layernorm(case) else size) * width + 2 * FP32
    # Its normalised input only for the gradient of its weight.
    copies = 2 if case.gpu.kind == "cpu" and not case.adapter else 1
    return FP32 * width * copies + FP32


def wide_layernorm(case: Case) -> bool:
    """Return True if LayerNorm computes in fp32 for any input: under autocast, on a GPU."""
    return case.autocast and case.arch.norm == "layernorm" and case.gpu.kind == "cuda"


def kept_again(case: Case) -> int:
    """Return the bytes of activations that a block with `train.remat` keeps.

    Full remat keeps the input of the block. Selective remat also keeps the outputs of attention, of
    every second matrix product (q, v, gate or up, down) and of collectives: tokens all-gathered
    twice and reduce-scattered twice (tensor parallelism), keys and values (context parallelism).
    The compiler drops the output of down, which no gradient needs.
    """
    arch, n, e, t = case.arch, case.tokens, case.product_bytes, case.sizes.tensor
    kept = n * case.product_bytes * arch.dim // t
    if case.cfg.train.remat == "full":
        return kept
    q, k = arch.n_heads * arch.head_dim // t, arch.n_kv_heads * arch.head_dim // t
    gated = arch.mlp != "gelu"
    products = q + k + arch.mlp_width // t + (arch.dim if gated and not case.compiled else 0)
    exchanged = 2 * (arch.dim + arch.dim // t) if t > 1 else 0
    if case.sizes.context > 1:
        exchanged += 2 * k * case.sizes.context
    return kept + n * (e * (q + products + exchanged) + FP32 * arch.n_heads // t)


def activations(case: Case, blocks: int) -> int:
    """Return the bytes of activations that the first `blocks` blocks keep."""
    kept = kept_by_block(case)
    if case.cfg.train.remat == "none":
        return blocks * kept
    return blocks * min(kept, kept_again(case))


def other_passes(case: Case, *, last: bool) -> int:
    """Return the bytes of activations of other passes during a backward pass of the stage.

    It is the `last` one of the stage in a step, or one before.
    """
    ranks, stages = case.sizes.pipeline, len(case.own_stages)
    if last:  # a round has a micro-batch for each rank, and the last stage goes backward first
        counts = Counter(dict.fromkeys(range(case.stage // ranks), ranks))
    else:  # forward passes take turns among the stages, round by round
        counts = Counter(i // ranks % stages for i in range(most_waiting(case)))
        counts[stages - 1] -= 1
    kept = 0
    for number, count in counts.items():
        of_stage = case.of_stage(case.rank + number * ranks)
        kept += count * _kept(of_stage)
    return kept


def most_waiting(case: Case) -> int:
    """Return the maximum number of passes of a rank that wait for their backward pass.

    Forward passes start ahead of the backward ones, by as many as it takes until the first gradient
    returns; then the two alternate.
    """
    ranks, stages = case.sizes.pipeline, len(case.own_stages)
    after = ranks - 1 - case.rank
    ahead = after if stages == 1 else (stages - 1) * ranks + 2 * after
    return min(stages * case.accumulation, ahead + 1)


def _kept(case: Case) -> int:
    """Return the bytes that a pass through the stage keeps for its backward pass.

    What it has received is not among them, but in `buffers`; what it has sent is.
    """
    kept = activations(case, case.blocks)
    if not case.first and (case.compiled or case.cfg.train.remat != "none"):
        kept -= hidden(case)
    return kept + (0 if case.last else hidden(case))


def hidden(case: Case) -> int:
    """Return the bytes of the hidden states of a micro-batch on one device."""
    return case.product_bytes * case.tokens * case.arch.dim // case.sizes.tensor


def received(case: Case) -> int:
    """Return the bytes that the rank receives from its neighbours in a step.

    torch has a buffer for each hidden state and each gradient of it, from the first step on.
    """
    ranks, stages = case.sizes.pipeline, len(case.stages)
    if ranks == 1:
        return 0
    own = range(case.rank, stages, ranks)
    pairs = sum((stage > 0) + (stage < stages - 1) for stage in own)
    return pairs * case.accumulation * hidden(case)


def idle(case: Case) -> float:
    """Return the time that a rank waits in a step for others, relative to that of its passes."""
    ranks, stages = case.sizes.pipeline, case.cfg.parallel.stages_per_rank
    return (ranks - 1) / (stages * case.accumulation)
