"""What one device receives in a step, by kind, in bytes; and how long that takes. Of Muon's
matrices what the busiest device receives, or sends if that is more.

Of n devices that gather or reduce-scatter a tensor of b bytes each receives b (n - 1) / n, of those
that all-reduce it twice that: it is a reduce-scatter and a gather (Patarasuk & Yuan, 2009). So many
bytes are the least possible, and what rings do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtt.train.estimate import muon
from dtt.train.estimate.case import Case, numbers

FP32 = 4
LINK = 0.8
"""Share of a link's speed that collectives of large tensors reach."""


@dataclass(frozen=True)
class Exchange:
    """One kind, all of a step together."""

    kind: str
    bytes: float
    """That a device receives."""
    seconds: float
    hidden: bool
    """Whether it can go on while products are computed."""


def exchanges(case: Case) -> list[Exchange]:
    """All kinds that there are; of whatever n - 1 is 0 there is none."""
    found = [*_data_parallel(case), *_tensor_parallel(case), *_context_parallel(case)]
    return [one for one in [*found, *_muon(case)] if one.bytes]


def _exchange(case: Case, kind: str, size: float, n: int, stride: int, *, hidden: bool) -> Exchange:
    """Of `size` bytes among n devices, `stride` apart in the order of ranks."""
    received = size * (n - 1) / n
    return Exchange(kind, received, received / _link(case, n * stride), hidden)


def _link(case: Case, ranks: int) -> float:
    """Bytes per second between devices among so many ranks, one after the other."""
    return LINK * (case.gpu.within if ranks <= case.gpus_per_node else case.gpu.between)


def _data_parallel(case: Case) -> Iterator[Exchange]:
    """FSDP2 gathers weights as products take them: of blocks in the forward pass, and once more in
    the backward pass if they were let go, of what is outside of blocks once; in every micro-batch.
    With the last, or with each, it reduce-scatters gradients in fp32; it all-reduces the parts over
    copies (HSDP). DDP all-reduces all gradients."""
    sizes, weights = case.sizes, numbers(case.weights)
    inner = sizes.tensor
    if not sizes.sharded:
        size = 2 * case.weight_bytes * weights
        yield _exchange(case, "all-reduce of gradients", size, sizes.replicate, 1, hidden=True)
        return
    blocks = numbers(w for w in case.weights if w.in_block)
    again = blocks if case.cfg.parallel.reshard else 0
    gathered = case.accumulation * case.product_bytes * (weights + again)
    yield _exchange(case, "all-gather of weights", gathered, case.spread, inner, hidden=True)
    times = case.accumulation if case.cfg.parallel.reduce == "each" else 1
    scattered = times * FP32 * weights
    yield _exchange(case, "reduce-scatter of gradients", scattered, case.spread, inner, hidden=True)
    part = 2 * FP32 * case.held(case.weights)
    stride = inner * case.spread
    yield _exchange(case, "all-reduce of gradients", part, sizes.replicate, stride, hidden=True)


def _tensor_parallel(case: Case) -> Iterator[Exchange]:
    """Each block gathers the tokens of the group twice, [N, D], and reduce-scatters them twice;
    the backward pass does the reverse. So do the embedding and the last norm, once each. Full
    remat does those of the forward pass again, but for the last, after which nothing is kept."""
    again = 3 / case.cfg.train.remat_every if case.cfg.train.remat == "full" else 0
    times = case.arch.n_layers * (8 + again) + 4
    size = case.product_bytes * case.accumulation * case.tokens * case.arch.dim * times
    yield _exchange(case, "tensor parallelism", size, case.sizes.tensor, 1, hidden=False)


def _context_parallel(case: Case) -> Iterator[Exchange]:
    """Each layer gathers keys and values of the whole sequence, and reduce-scatters their
    gradients; with full remat it gathers twice."""
    arch, sizes = case.arch, case.sizes
    width = 2 * arch.n_kv_heads * arch.head_dim // sizes.tensor
    repeats = 2 + (1 / case.cfg.train.remat_every if case.cfg.train.remat == "full" else 0)
    whole = case.tokens * sizes.context * width * arch.n_layers
    size = case.product_bytes * case.accumulation * whole * repeats
    yield _exchange(case, "context parallelism", size, sizes.context, sizes.tensor, hidden=False)


def _muon(case: Case) -> Iterator[Exchange]:
    """Parts of matrices to their owners, and back."""
    size = muon.exchanged(case)
    yield Exchange("Muon's matrices", size, size / _link(case, case.devices), hidden=True)
