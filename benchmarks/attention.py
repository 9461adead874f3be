"""Compare dtt's block-sparse CPU attention with SDPA under a dense mask, forward and backward.

    python benchmarks/attention.py [--lengths 1024 4096 16384]

One sequence, 2 query heads that share one key/value head of width 64, fp32, one thread. Each figure
is measured in a separate process: the CPU time (which other load on the machine affects less than
wall time) of the fastest of the runs that fit into half a second, and the peak memory above the
level before. Outputs and gradients of both are first compared at 1000 tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measurement import Table, peak_memory, reset_peak_memory, resident_memory
from torch import Tensor

from dtt.model.attention_backend import AttentionFn, Causal, Tiled

SCALE = 0.125
WINDOW = 512
KINDS = ("causal", "window", "documents", "documents, window")


def documents_of(length: int) -> Tensor:
    """Return document ids, shape [1, T], for documents of 500 tokens on average."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(1, length, generator=generator) < 1 / 500).cumsum(1)


def block_sparse(kind: str, length: int) -> AttentionFn:
    """Return the attention back end that the decoder uses."""
    if kind == "causal":
        return Causal(SCALE)
    documents = documents_of(length) if "documents" in kind else None
    return Tiled(SCALE, documents, WINDOW if "window" in kind else None)


def dense(kind: str, length: int) -> AttentionFn:
    """Return SDPA with a [T, T] mask that each call builds, as training would for each batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool).tril_()
        if "window" in kind:
            seen = seen.triu_(1 - WINDOW)
        if "documents" in kind:
            documents = documents_of(length)
            seen &= documents[0, :, None] == documents[0, None]
        return F.scaled_dot_product_attention(q, k, v, seen, scale=SCALE, enable_gqa=True)

    return attend


def inputs(length: int) -> list[Tensor]:
    """Return random queries, keys and values in the layout that the projections produce."""
    torch.manual_seed(0)
    return [torch.randn(1, length, n, 64).transpose(1, 2).requires_grad_() for n in (2, 1, 1)]


def gradients(attend: AttentionFn, length: int) -> list[Tensor]:
    """Return the output and the gradients of its sum."""
    q_k_v = inputs(length)
    out = attend(*q_k_v)
    return [out, *torch.autograd.grad(out.sum(), q_k_v)]


def measure(make: Callable[[str, int], AttentionFn], kind: str, length: int) -> tuple[float, float]:
    """Return the CPU seconds and the MiB of one forward and backward pass."""
    gradients(make(kind, 64), 64)
    attend, before = make(kind, length), resident_memory()
    reset_peak_memory()
    times: list[float] = []
    while sum(times) < 0.5:
        start = time.process_time()
        gradients(attend, length)
        times.append(time.process_time() - start)
    return min(times), (peak_memory() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in KINDS:
        torch.testing.assert_close(
            gradients(block_sparse(kind, 1000), 1000), gradients(dense(kind, 1000), 1000)
        )
    table = Table("", 28, {"dense mask": 20, "dtt": 20, "time": 9, "memory": 9})
    fork = multiprocessing.get_context("fork")
    for kind in KINDS:
        for length in args.lengths:
            figures = []
            for make in (dense, block_sparse):
                with fork.Pool(1) as pool:
                    figures.append(pool.apply(measure, (make, kind, length)))
            (dense_seconds, dense_mib), (seconds, mib) = figures
            table.row(
                f"{kind:<20}{length:>8}",
                f"{1e3 * dense_seconds:.0f} ms{dense_mib:>5.0f} MB",
                f"{1e3 * seconds:.0f} ms{mib:>5.0f} MB",
                f"{dense_seconds / seconds:.1f}x",
                f"{dense_mib / mib:.1f}x" if mib > 5 else "",
            )


if __name__ == "__main__":
    main()
