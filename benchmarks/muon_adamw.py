"""Compare tuned Muon and AdamW: steps and time to the same validation loss.

    python benchmarks/muon_adamw.py TOKENS [--work DIR] [--steps N] [key=value …]

TOKENS is a folder made by `dtt tokenize -c novels`. Each run is a `dtt train -c novels` (a Llama of
14M parameters) of N steps. First comes a grid: every learning rate of LRS with seed 0. Then the
other seeds run at the best rate of each optimizer, and Muon also with shorter schedules; from their
final losses follows the number of steps that Muon needs to reach AdamW's final loss. Runs that are
complete in DIR are not repeated. Time is the number of steps times the median time of a step.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jobs import DTT

from dtt.track import jsonl, summary

LRS = {"adamw": (5e-4, 1e-3, 2e-3, 4e-3), "muon": (1e-3, 2e-3, 4e-3, 8e-3)}
SEEDS = (0, 1, 2)
HORIZONS = (0.5, 1.0)


@dataclass(frozen=True)
class Runs:
    """Training runs in one folder."""

    tokens: Path
    work: Path
    steps: int
    overrides: list[str]

    def loss(self, optimizer: str, lr: float, seed: int, horizon: float = 1.0) -> float:
        """Return the final validation loss of a run, in nats; train the run if it is missing."""
        steps = round(self.steps * horizon)
        job = self.work / "jobs" / f"{optimizer}-{lr:g}-{steps}-{seed}"
        values: dict[str, object] = {
            "name": job.name,
            "seed": seed,
            "data.tokens": self.tokens,
            "train.steps": steps,
            "train.eval_every": 0,
            "optim.type": optimizer,
            "optim.lr": lr,
        }
        if optimizer == "muon":
            values["optim.adamw.lr"] = lr
        settings = [f"{key}={value}" for key, value in values.items()]
        command = [*DTT, "train", "-c", "novels", *settings, *self.overrides]
        subprocess.run(command, check=True, cwd=self.work)
        last = summary.summarize(job / "metrics.jsonl").last_eval
        assert last is not None
        assert last["step"] == steps
        print(f"{job.name:<24} {last['loss']:.4f}", file=sys.stderr, flush=True)
        return float(last["loss"])

    def step_seconds(self, optimizer: str) -> float:
        """Return the median time of a step over all runs of an optimizer."""
        times: list[float] = []
        for path in self.work.glob(f"jobs/{optimizer}-*/metrics.jsonl"):
            times += [record["seconds_per_step"] for record in jsonl.read(path, "perf")]
        return statistics.median(times)


def spread(values: list[float]) -> str:
    """Format the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.4f} ± {error:.4f}"


def steps_needed(losses: dict[int, float], target: float) -> float:
    """Interpolate the number of steps at which the final loss equals `target`.

    `losses` maps schedule lengths to final losses. If even the shortest schedule ends below
    `target`, return its length, which is then an upper bound; NaN if none reaches `target`.
    """
    points = sorted(losses.items())
    for (a, high), (b, low) in pairwise(points):
        if low <= target <= high:
            return a + (b - a) * (high - target) / (high - low)
    return math.nan if points[-1][1] > target else points[0][0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--work", type=Path, default=Path("muon-adamw"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    options.work.mkdir(parents=True, exist_ok=True)
    runs = Runs(
        options.tokens.absolute(), options.work.absolute(), options.steps, options.overrides
    )
    best = {}
    print(f"validation loss after {options.steps} steps, seed 0")
    for optimizer, lrs in LRS.items():
        losses = {lr: runs.loss(optimizer, lr, SEEDS[0]) for lr in lrs}
        best[optimizer] = min(losses, key=losses.__getitem__)
        print(
            f"  {optimizer:<6}" + "".join(f"  lr {lr:g}: {loss:.4f}" for lr, loss in losses.items())
        )
    adamw = [runs.loss("adamw", best["adamw"], seed) for seed in SEEDS]
    muon = {
        seed: {round(options.steps * h): runs.loss("muon", best["muon"], seed, h) for h in HORIZONS}
        for seed in SEEDS
    }
    print(f"\nat the best rates, {len(SEEDS)} seeds, mean ± standard error")
    print(f"  adamw, {options.steps} steps: {spread(adamw)}")
    for steps in muon[SEEDS[0]]:
        print(f"  muon,  {steps} steps: {spread([losses[steps] for losses in muon.values()])}")
    needed = [steps_needed(muon[seed], target) for seed, target in zip(SEEDS, adamw, strict=True)]
    seconds = {optimizer: runs.step_seconds(optimizer) for optimizer in LRS}
    shares = [steps / options.steps for steps in needed]
    ratio = seconds["muon"] / seconds["adamw"]
    bound = "at most " if min(shares) <= HORIZONS[0] else ""
    print(f"\nto the loss that adamw ends with, muon takes {bound}{spread(shares)} of its steps")
    print(f"  a step: adamw {seconds['adamw']:.3f} s, muon {seconds['muon']:.3f} s ({ratio:.2f}x)")
    print(f"  so {bound}{spread([share * ratio for share in shares])} of its time")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    main()
