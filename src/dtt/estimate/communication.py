"""Bytes that one device receives in a step, by kind of communication, and their duration.

For Muon, the bytes are those of the busiest device: what it receives, or sends if that is more.

In an all-gather or reduce-scatter of a tensor of b bytes over n devices, each device receives
b (n - 1) / n bytes; in an all-reduce, which is a reduce-scatter and an all-gather, twice that
(Patarasuk & Yuan, 2009). This is the minimum, and ring algorithms attain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from dtt.estimate import optimizer_cost
from dtt.estimate.activations import received
from dtt.estimate.case import EXPERTS, FP32, Case, Weight, numbers
from dtt.train.precision import Precision

LINK = 0.8
"""Fraction of a link's bandwidth that collectives of large tensors reach."""


@dataclass(frozen=True)
class CollectiveCost:
    """The bytes and the time of one kind of communication in a step."""

    kind: str
    bytes: float
    """Bytes that a device receives in a step."""
    seconds: float
    hidden: bool
    """True if it can overlap with computation."""
    ends: float = 0.0
    """Of one that can, the seconds of its messages before the first layer and after the last
    backward pass, when there is nothing to compute."""


def collective_costs(case: Case) -> list[CollectiveCost]:
    """Return the kinds of communication in a step, without those over a single device."""
    costs = [
        *_data_parallel(case),
        *_tensor_parallel(case),
        *_context_parallel(case),
        *_expert_parallel(case),
        *_pipeline(case),
    ]
    # The all-to-alls of Muon: parts of matrices to the assigned ranks, and updates back.
    size = optimizer_cost.exchanged(case)
    seconds = size / _link(case, case.stage_devices)
    costs.append(CollectiveCost("Muon's matrices", size, seconds, hidden=True))
    return [one for one in costs if one.bytes]


def _cost(
    case: Case, kind: str, size: float, n: int, stride: int, *, hidden: bool, ends: float = 0.0
) -> CollectiveCost:
    """Return the communication of `size` bytes over n devices that are `stride` ranks apart.

    Those of its first and last messages are `ends`.
    """
    received, speed = size * (n - 1) / n, _link(case, n * stride)
    return CollectiveCost(kind, received, received / speed, hidden, ends * (n - 1) / n / speed)


def _link(case: Case, ranks: int) -> float:
    """Return the bytes per second between devices of a group that spans `ranks` adjacent ranks."""
    return LINK * (case.gpu.within if ranks <= case.gpus_per_node else case.gpu.between)


def _data_parallel(case: Case) -> Iterator[CollectiveCost]:
    """Yield the communication of FSDP2, HSDP or DDP.

    FSDP2 all-gathers weights in the compute dtype (fp8: matrices of blocks in fp8) in every
    micro-batch: an untied head once, or up
    to three times if its rank has several stages, the
    others outside of blocks once for each stage of a rank, those of blocks in the forward pass, and
    in the backward pass again if they were resharded in between. It reduce-scatters gradients in
    fp32, after the last micro-batch or after each, and all-reduces the shards over replicas (HSDP).
    DDP all-reduces all gradients. The step begins with a gather of the weights outside of blocks,
    without the head, and of the first block, and ends with the reduction of their gradients.
    """
    sizes, trained = case.sizes, numbers(case.trained)
    inner, reduction = sizes.tensor, "all-reduce of gradients"
    blocks = [w for w in case.weights if w.in_block and EXPERTS not in w.name]
    # The weights of the first block of this rank, without its experts.
    lowest = ".".join(blocks[0].name.split(".")[:2]) + "." if blocks else ""
    first = [*case.in_root, *(w for w in blocks if w.name.startswith(lowest))]
    if not sizes.sharded:
        factor = 2 * case.weight_bytes
        # A bucket of DDP is reduced once all its gradients are there: the embedding's come last.
        ends = factor * _trained(case.outside)
        size = factor * trained
        yield _cost(case, reduction, size, sizes.replicate, 1, hidden=True, ends=ends)
        return
    experts = [w for w in case.weights if EXPERTS in w.name]
    passes = 2 if case.cfg.parallel.reshard else 1
    stages, root = len(case.own_stages), bytes_gathered(case, case.in_root)
    head = bytes_gathered(case, case.outside) - root
    # Backward passes of a rank's other stages free the head between its own passes, and prefetch it
    # for themselves (traced).
    heads = 3 - 2 / case.accumulation if stages > 1 else 1
    outside = stages * root + heads * head
    each = case.reduces_each
    none: list[Weight] = []
    spread = case.spread * sizes.tensor // case.cfg.parallel.expert
    for weights, more, at_ends, name, n, stride in (
        (blocks, outside, first, "", case.spread, inner),
        (experts, 0, none, " of experts", spread, case.cfg.parallel.expert),
    ):
        gathered = case.accumulation * (passes * _bytes_sent(case, weights) + more)
        kind, begin = f"all-gather of weights{name}", _bytes_sent(case, at_ends)
        yield _cost(case, kind, gathered, n, stride, hidden=True, ends=begin)
        own = _trained(weights)
        if not name:
            own += _trained(case.outside)
        scattered = (case.accumulation if each else 1) * FP32 * own
        kind, end = f"reduce-scatter of gradients{name}", FP32 * _trained(at_ends)
        yield _cost(case, kind, scattered, n, stride, hidden=True, ends=end)
    part, stride = 2 * FP32 * case.held(case.trained), inner * case.spread
    end = 2 * FP32 * _trained(first) // case.spread
    yield _cost(case, reduction, part, sizes.replicate, stride, hidden=True, ends=end)


def _trained(weights: Iterable[Weight]) -> int:
    """Return the number of elements of those that are not frozen."""
    return numbers(weight for weight in weights if weight.trained)


def bytes_gathered(case: Case, weights: Iterable[Weight]) -> int:
    """Return the bytes of gathered `weights`: in the compute dtype, or in 4 bits."""
    sizes = ((w.itemsize if w.quantized else case.product_bytes) * prod(w.part) for w in weights)
    return round(sum(sizes))


def _bytes_sent(case: Case, weights: Iterable[Weight]) -> int:
    """Return the bytes that ranks send of gathered `weights`; fp8's scales of rows are left out."""
    weights = list(weights)
    if case.precision is not Precision.FP8:
        return bytes_gathered(case, weights)
    in_fp8 = [w for w in weights if w.in_block and len(w.shape) == 2]
    return bytes_gathered(case, weights) - (case.product_bytes - 1) * numbers(in_fp8)


def _tensor_parallel(case: Case) -> Iterator[CollectiveCost]:
    """Yield the communication of tensor parallelism.

    Each block all-gathers the tokens of the group, [N, D], twice and reduce-scatters them twice;
    the backward pass does the reverse. The embedding and the last norm do so once each. Full remat
    repeats the collectives of a block's forward pass except the last one, after which nothing is
    kept.
    """
    again = 3 if case.cfg.train.remat == "full" else 0
    ends = (case.rank == 0) + (case.rank == case.sizes.pipeline - 1)
    times = case.own_blocks * (8 + again) + 2 * ends
    size = case.product_bytes * case.accumulation * case.tokens * case.arch.dim * times
    yield _cost(case, "tensor parallelism", size, case.sizes.tensor, 1, hidden=False)


def _context_parallel(case: Case) -> Iterator[CollectiveCost]:
    """Yield the communication of context parallelism.

    Each layer all-gathers the keys and values of the full sequence, and reduce-scatters their
    gradients; with full remat it all-gathers twice.
    """
    arch, sizes = case.arch, case.sizes
    width = 2 * arch.n_kv_heads * arch.head_dim // sizes.tensor
    repeats = 3 if case.cfg.train.remat == "full" else 2
    whole = case.tokens * sizes.context * width * case.own_blocks
    size = case.product_bytes * case.accumulation * whole * repeats
    yield _cost(case, "context parallelism", size, sizes.context, sizes.tensor, hidden=False)


def _expert_parallel(case: Case) -> Iterator[CollectiveCost]:
    """Yield the communication of expert parallelism.

    Each mixture sends the rows of its tokens to their experts, and the results back, and in the
    backward pass the gradients of both; full remat repeats the forward pass. Estimated for an even
    load: each device receives as many rows as it sends.
    """
    mixture = case.arch.mixture
    if mixture is None:
        return
    repeats = 6 if case.cfg.train.remat == "full" else 4
    rows = case.tokens // case.sizes.tensor * mixture.per_token * case.own_blocks
    size = case.product_bytes * case.accumulation * rows * case.arch.dim * repeats
    yield _cost(case, "all-to-all of rows", size, case.cfg.parallel.expert, 1, hidden=False)


def _pipeline(case: Case) -> Iterator[CollectiveCost]:
    """Yield the hidden states and gradients that a rank receives from its neighbours.

    1F1B waits for each; the interleaved schedule computes for another stage meanwhile.
    """
    size, hidden = received(case), case.cfg.parallel.stages_per_rank > 1
    # The neighbour is as many ranks away as a stage has devices.
    seconds = size / _link(case, case.stage_devices + 1)
    yield CollectiveCost("hidden states of the pipeline", size, seconds, hidden=hidden)
