"""How long a step takes, and the run: from operations, bytes and the speeds of a device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dtt.model import count
from dtt.train.estimate.case import Case
from dtt.train.estimate.communication import Exchange, exchanges
from dtt.train.precision import Precision

ACHIEVED = {"cuda": {True: 0.454, False: 0.392}, "cpu": {True: 0.6, False: 0.4}}
"""Share of the bf16 (or fp32) peak that forward and backward passes, remat included, reach between
exchanges, with compiled blocks and without. On a GPU it is fitted to what `SOURCE` publishes: 6,667
tokens/s per GPU with torch.compile, 5,762 without (bf16, sequences of 8,192, FSDP2, selective
remat, a local batch of 2, H100 limited to 500 W). GPUs with more power reach more: an H200 0.7 with
full remat (KempnerForge). Models below 1B reach less. On a CPU it is a guess."""
FP8 = 1.28
"""Speed of a step in fp8 beside bf16, fitted to the 8,532 tokens/s per GPU of `SOURCE`."""
SOURCE = "torchtitan for Llama 3.1 8B on 8 H100 (benchmarks/llama3_h100_202412_torchtitan.md)"
NEWTON_SCHULZ = 0.4
"""The same of Muon's orthogonalisation, whose matrices are smaller."""
LEAD_SECONDS = 120
"""Before a time limit, when a run saves and stops, unless `launch.lead_seconds` says otherwise."""
START_SECONDS = 120
"""From the start of a job to its first step, with compilation."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step, by what for."""

    compute: float
    optimizer: float
    exposed: float
    """Exchanges that nothing hides."""
    exchanges: list[Exchange]
    flops: float
    """Of the model, on all devices."""

    peak: float
    """FLOP/s of all devices, for MFU."""

    @property
    def seconds(self) -> float:
        """In all."""
        return self.compute + self.optimizer + self.exposed

    @property
    def mfu(self) -> float:
        """The model's operations, not those of remat and optimizer, over what the peak allows."""
        return self.flops / (self.seconds * self.peak)


def step_of(case: Case) -> Step:
    """Products of a step over the share of the peak that is reached; FSDP2 and DDP exchange beside
    them, as far as there is time, tensor and context parallelism do not."""
    train, arch = case.cfg.train, case.arch
    tokens = case.sequences * case.sizes.data * train.seq_len
    per_token = count.flops_per_token(arch, train.seq_len)
    flops = float(tokens * per_token)
    peak = case.gpu.fp32 if case.product_bytes == 4 else case.gpu.bf16
    compute = flops * (1 + _again(case)) / (peak * achieved(case) * case.devices)
    found = exchanges(case)
    beside = sum(one.seconds for one in found if one.hidden)
    exposed = max(0.0, beside - compute) + sum(one.seconds for one in found if not one.hidden)
    return Step(compute, _optimizer(case, peak), exposed, found, flops, peak * case.devices)


def achieved(case: Case) -> float:
    """Return the share of the peak for bf16 (fp32 for fp32) that products are assumed to reach."""
    share = ACHIEVED[case.gpu.kind][case.compiled]
    return share * FP8 if case.precision is Precision.FP8 else share


def _again(case: Case) -> float:
    """Share of a step's operations that remat adds: of the blocks' third that is the forward pass,
    all or about half."""
    train, arch = case.cfg.train, case.arch
    if train.remat == "none":
        return 0.0
    head = 6 * arch.vocab_size * arch.dim
    blocks = 1 - head / count.flops_per_token(arch, train.seq_len)
    return blocks / 3 * (1.0 if train.remat == "full" else 0.5) / train.remat_every


def _optimizer(case: Case, peak: float) -> float:
    """AdamW reads and writes memory: weight, gradient, two moments, and of all but the gradient the
    new ones, 7 numbers a weight, Muon about as many. All wait for the busiest owner of matrices."""
    moved = 7 * case.weight_bytes * case.held(case.weights) / case.gpu.bandwidth
    if case.muon is None:
        return moved
    loads = Counter[int]()
    for matrix in case.matrices:
        loads[matrix.owner] += matrix.flops
    return moved + case.muon.ns_steps * max(loads.values(), default=0) / (peak * NEWTON_SCHULZ)


@dataclass(frozen=True)
class Run:
    """The run as a whole."""

    seconds: float
    """Of steps and evaluations, until the end."""
    slices: int | None
    """Jobs of `launch.time` that it takes; None: there is no limit."""


def run_of(case: Case, one: Step) -> Run:
    """Evaluations are forward passes, a third of the operations; saves go on beside training."""
    train, stages = case.cfg.train, case.stages
    tokens = stages.tokens_before(case.steps)
    per_token = one.seconds / stages.batch_tokens(case.steps - 1)
    often = case.steps // train.eval_every if train.eval_every else 1
    seconds = per_token * (tokens + (often + 1) * train.eval_tokens / 3)
    limit = case.cfg.launch.time_limit
    if limit is None:
        return Run(seconds, None)
    usable = limit - (case.cfg.launch.lead_seconds or LEAD_SECONDS) - START_SECONDS
    return Run(seconds, math.ceil(seconds / usable) if usable > 0 else None)
