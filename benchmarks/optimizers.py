"""Compare the time of an optimizer step: dtt's Muon, torch's Muon and fused AdamW.

    python benchmarks/optimizers.py [ROUNDS] [--fp32] [--shape LAYERSxDIM]

The matrices are those of a Llama of that shape (12x768 by default); threads and device are torch's
defaults. torch.optim.Muon always iterates in bf16; `--fp32` makes dtt iterate in fp32, as it does
on hardware without bf16. The optimizers take turns, so that other load on the machine affects all
alike; the first round is a warm-up and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from torch.optim import Optimizer

from dtt.config.optim import MuonConfig
from dtt.optim.muon import Muon

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
    guarded = Muon(matrices(layers, dim), MuonConfig(), dtype)
    guarded.found_inf = torch.zeros((), device=DEVICE)
    express = MuonConfig(ns_coefficients="polar-express")
    everything = MuonConfig(
        ns_coefficients="polar-express",
        momentum_warmup=100,
        normuon_beta2=0.95,
        cautious_weight_decay=True,
    )
    return {
        "dtt Muon": Muon(matrices(layers, dim), MuonConfig(), dtype),
        "  that can skip": guarded,
        "  Polar Express": Muon(matrices(layers, dim), express, dtype),
        "  every option": Muon(matrices(layers, dim), everything, dtype),
        "torch Muon, bf16": torch.optim.Muon(
            matrices(layers, dim), lr=LR, adjust_lr_fn="match_rms_adamw"
        ),
        "torch AdamW, fused": torch.optim.AdamW(matrices(layers, dim), lr=LR, fused=True),
    }


def seconds(optimizer: Optimizer) -> float:
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
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(given.rounds + 1):
        for name, optimizer in candidates.items():
            taken = seconds(optimizer)
            if round_ > 0:
                times[name].append(1e3 * taken)
    count = sum(p.numel() for p in matrices(layers, dim))
    print(f"{count / 1e6:.1f}M parameters in matrices, {dtype}, {DEVICE}, {given.rounds} rounds")
    print(f"{'ms':<22}{'median':>10}{'min':>10}{'of dtt Muon':>14}")
    ours = statistics.median(times["dtt Muon"])
    for name, ms in times.items():
        median = statistics.median(ms)
        print(f"{name:<22}{median:>10.1f}{min(ms):>10.1f}{median / ours:>14.2f}")


if __name__ == "__main__":
    main()
