"""Compare dtt's chunked loss, torch's linear_cross_entropy, and the loss over all logits.

    python benchmarks/loss.py [N] [ROUNDS]

N tokens (4,096) of width 768, forward and backward, fp32 weights; vocabularies of 50,304 and
128,256; on a GPU if there is one. `memory`: peak above the level before, gradients included.
`error`: relative error of the gradients against float64 (norm of the difference over the norm; the
larger of hidden's and weight's), on 256 tokens. Medians of ROUNDS (3) interleaved rounds. On a CPU,
seconds are CPU time, which other load on the machine affects less than wall time. Autocast does not
cover torch's linear_cross_entropy, so it gets bf16 copies.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measurement import (
    column_medians,
    in_turns,
    peak_memory,
    reset_peak_memory,
    resident_memory,
)
from torch import Tensor

from dtt.model.loss import linear_cross_entropy

D, TOKENS_FOR_ERROR = 768, 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy computed from the logits of all tokens."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def plain_wide(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the reference loss, without casts: the inputs are float64."""
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of torch's linear_cross_entropy, available since torch 2.13."""
    kind = DEVICE.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss: Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined, unused-ignore]
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined, unused-ignore]
    )
    return loss


def problem(n: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return hidden states as after a norm, and weights and targets as at the start of training."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float32)
    weight = 0.02 * torch.randn(vocab_size, D, generator=generator, dtype=torch.float32)
    targets = torch.randint(vocab_size, (n,), generator=generator)
    return [
        hidden.to(DEVICE, dtype).requires_grad_(),
        weight.to(DEVICE, dtype).requires_grad_(),
        targets.to(DEVICE),
    ]


def gradients(loss: Loss, tensors: list[Tensor], bf16: bool) -> tuple[Tensor, ...]:
    """Return the gradients of the mean loss, computed as in training."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
        mean = loss(tensors[0], tensors[1], tensors[2]) / len(tensors[2])
    return torch.autograd.grad(mean, tensors[:2])


def error(loss: Loss, vocab_size: int, bf16: bool, exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error of a gradient."""
    actual = gradients(loss, problem(TOKENS_FOR_ERROR, vocab_size), bf16)
    pairs = zip(actual, exact, strict=True)
    return max(float((g.double() - e).norm() / e.norm()) for g, e in pairs)


def once(loss: Loss, tensors: list[Tensor], bf16: bool) -> tuple[float, float]:
    """Return the seconds and the peak memory in MB of one forward and backward pass."""
    before = reset_peak()
    clock = time.perf_counter if DEVICE.type == "cuda" else time.process_time
    start = clock()
    gradients(loss, tensors, bf16)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start, (peak() - before) / 1e6


def reset_peak() -> int:
    """Reset the peak to the bytes in use now, and return them."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    reset_peak_memory()
    return resident_memory()


def peak() -> int:
    """Return the peak of bytes in use since the reset."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else peak_memory()


def main() -> None:
    """Print one line per vocabulary, precision and implementation."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    losses: dict[str, Loss] = {"plain": plain, "dtt": linear_cross_entropy}
    if hasattr(F, "linear_cross_entropy"):
        losses["torch"] = torch_chunked
    print(f"torch {torch.__version__}, {DEVICE}, {torch.get_num_threads()} threads, N={n}, D={D}")
    for vocab_size in (50_304, 128_256):
        exact = gradients(plain_wide, problem(TOKENS_FOR_ERROR, vocab_size, torch.float64), False)
        for bf16 in (False, True):
            errors = {name: error(loss, vocab_size, bf16, exact) for name, loss in losses.items()}
            tensors = problem(n, vocab_size)
            runs = {name: partial(once, loss, tensors, bf16) for name, loss in losses.items()}
            results = in_turns(runs, rounds, warm_up=0)
            medians = {name: column_medians(rows) for name, rows in results.items()}
            seconds, memory = medians["plain"]
            for name, (s, m) in medians.items():
                print(
                    f"V={vocab_size:<7,} {'bf16' if bf16 else 'fp32'}  {name:<6}"
                    f"{s:8.2f} s ({s / seconds:4.2f}) {m:8,.0f} MB ({m / memory:4.2f})"
                    f"   error {errors[name]:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
