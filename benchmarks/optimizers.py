"""Compare the time of an optimizer step: dtt's Muon, torch's Muon and fused AdamW.

    python benchmarks/optimizers.py [ROUNDS] [--fp32] [--shape LAYERSxDIM]

The matrices are those of a Llama of that shape (12x768 by default); threads and device are torch's
defaults. torch.optim.Muon always iterates in bf16; `--fp32` makes dtt iterate in fp32, as it does
on hardware without bf16. The optimizers take turns; the first round is a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from measurement import Table, in_turns
from torch import nn
from torch.optim import Optimizer

from dtt.config.optim import MuonConfig
from dtt.optim.muon.optimizer import Muon

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LR = 1e-3


def matrices(layers: int, dim: int) -> list[nn.Parameter]:
    """Return attention and SwiGLU weights, each with a gradient."""
    ffn = dim * 8 // 3
    shapes = [*4 * [(dim, dim)], (ffn, dim), (ffn, dim), (dim, ffn)] * layers
    params = [nn.Parameter(0.02 * torch.randn(shape, device=DEVICE)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def optimizers(layers: int, dim: int, dtype: torch.dtype) -> dict[str, Optimizer]:
    """Return the optimizers by name; dtt's iterate in `dtype`."""
    skipping = Muon(matrices(layers, dim), MuonConfig(), dtype)
    skipping.found_inf = torch.zeros((), device=DEVICE)
    polar_express = MuonConfig(ns_coefficients="polar-express")
    everything = MuonConfig(
        ns_coefficients="polar-express",
        momentum_warmup=100,
        normuon_beta2=0.95,
        weight_decay="cautious 0.1",
    )
    return {
        "dtt Muon": Muon(matrices(layers, dim), MuonConfig(), dtype),
        "  that can skip": skipping,
        "  Polar Express": Muon(matrices(layers, dim), polar_express, dtype),
        "  every option": Muon(matrices(layers, dim), everything, dtype),
        "torch Muon, bf16": torch.optim.Muon(
            matrices(layers, dim), lr=LR, adjust_lr_fn="match_rms_adamw"
        ),
        "torch AdamW, fused": torch.optim.AdamW(matrices(layers, dim), lr=LR, fused=True),
    }


def seconds(optimizer: Optimizer) -> float:
    """Return the seconds of one update."""
    start = time.perf_counter()
    optimizer.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=7)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--shape", default="12x768")
    given = parser.parse_args()
    layers, dim = map(int, given.shape.split("x"))
    dtype = torch.float32 if given.fp32 else torch.bfloat16
    candidates = optimizers(layers, dim, dtype)
    steps = {name: partial(seconds, optimizer) for name, optimizer in candidates.items()}
    times = in_turns(steps, given.rounds)
    count = sum(p.numel() for p in matrices(layers, dim))
    print(f"{count / 1e6:.1f}M parameters in matrices, {dtype}, {DEVICE}, {given.rounds} rounds")
    table = Table("ms", 22, {"median": 10, "min": 10, "of dtt Muon": 14})
    reference = statistics.median(times["dtt Muon"])
    for name, spent in times.items():
        median = statistics.median(spent)
        ratio = median / reference
        table.row(name, f"{1e3 * median:.1f}", f"{1e3 * min(spent):.1f}", f"{ratio:.2f}")


if __name__ == "__main__":
    main()
