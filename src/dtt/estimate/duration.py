"""Estimated duration of a step and of the run, from FLOPs, bytes and the speed of a device.

An estimate counts FLOPs, bytes and the communication that nothing hides. It is a bound: messages
between computations, slower cards of a node and limits of power make each published run slower.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dtt.config.value_types import seconds as budget_seconds
from dtt.estimate.activations import idle, kept_by_block
from dtt.estimate.case import Case
from dtt.estimate.communication import CollectiveCost, collective_costs
from dtt.optim import eight_bit
from dtt.optim.muon.newton_schulz import POLYNOMIALS
from dtt.train.precision import Precision

ACHIEVED = {"cuda": {True: 0.72, False: 0.63}, "cpu": {True: 0.6, False: 0.4}}
"""Fraction of the bf16 (or fp32) peak that matrix products and attention reach, remat included,
with compiled blocks (True) and without (False). On a CPU, it is the fraction of the whole passes,
and a guess. The GPU values are fitted to `SOURCE`, together with `PASSES`; without compilation it
is lower by the ratio that torchtitan publishes (5,762 to 6,667 tokens/s)."""
PASSES = 9
"""Times that the bytes which a block keeps for its backward pass cross the memory of a GPU in both
passes: kernels between the products read and write them, and norms, rotations and gradients."""
LOGIT_PASSES = 6
"""Times that a chunk of logits does: two products write or read it, and so does the loss."""
FP8 = 1.28
"""Speed of a step in fp8 relative to bf16, as torchtitan publishes it: 8,532 to 6,667 tokens/s."""
SOURCE = "dtt on one H200: 528.6k tokens/s with GPT-2 124M, 69.9k with Llama 1B, 12.15k with 8B"
NEWTON_SCHULZ = 0.4
"""Fraction of the peak that Muon's orthogonalisation reaches; its matrices are smaller."""
OF_8_BITS = 154
"""Bytes that the conversions of `dtt.optim.adamw_optimizers` move for each weight, counted, not
measured: torch fuses none of these operations."""
LEAD_SECONDS = 120
"""Seconds before a time limit at which a run saves and stops, before any are measured."""
START_SECONDS = 120
"""Seconds from the start of a job to its first step, with compilation."""


TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, GPUs limited to 500 W"


@dataclass(frozen=True)
class Published:
    """A published run."""

    what: str
    share: float
    """Its tokens per second as a fraction of those that are estimated for it.
    tests/estimate/test_layout_plans.py computes it again from the published figure."""

    def describe(self) -> str:
        """Return a sentence for the plan."""
        return f"{self.what} reached {self.share:.0%} of such an estimate"


NODE = Published("Llama 8B on 8 H100 (FSDP)", 0.72)
NODES = Published("Llama 8B on 128 H100 (FSDP)", 0.74)
CONTEXT_2 = Published("Llama 8B with each sequence on 2 H100 (fp8)", 0.59)
CONTEXT_4 = Published("Llama 8B with each sequence on 4 H100 (fp8)", 0.41)
STAGES = Published("Llama 405B in 8 stages on 512 H100 (fp8)", 0.70)
INTERLEAVED = Published("Llama 405B in 16 interleaved stages on 512 H100 (fp8)", 0.82)


def slowest_like(case: Case) -> Published | None:
    """Return the slowest of the published runs that divide their model as `case` does.

    None for one device, whose speed dtt has measured itself, and for processes of a CPU.
    """
    # Tensor parallelism has no entry: the estimate counts all of its communication, and Llama 70B
    # on 256 H100 (8 for each layer, fp8) reached 101 % of it.
    if case.devices == 1 or case.gpu.kind == "cpu":
        return None
    alike = [NODE if case.nodes == 1 else NODES]
    if case.sizes.context > 1:
        alike.append(CONTEXT_2 if case.sizes.context == 2 else CONTEXT_4)
    if case.sizes.pipeline > 1:
        alike.append(INTERLEAVED if case.cfg.parallel.stages_per_rank > 1 else STAGES)
    return min(alike, key=lambda one: one.share)


@dataclass(frozen=True)
class StepEstimate:
    """The estimated duration of a step, in seconds, by part."""

    compute: float
    """Forward and backward passes, remat included."""
    optimizer: float
    exposed: float
    """Communication that computation does not hide."""
    idle: float
    """Waiting for other ranks of a pipeline, at the start and the end of a step."""
    collectives: list[CollectiveCost]
    flops: float
    """FLOPs of the model in a step, on all devices."""

    peak: float
    """FLOP/s of all devices, for MFU."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.compute + self.optimizer + self.exposed + self.idle

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of remat and of the optimizer do not count."""
        return self.flops / (self.seconds * self.peak)


def step_of(case: Case) -> StepEstimate:
    """Return the estimate of a step, of the slowest rank of a pipeline.

    The communication of FSDP2, DDP and Muon is hidden up to the duration of the computation, but
    for its first and last messages, and that of an interleaved pipeline; that of tensor and context
    parallelism is not.
    """
    ranks = map(case.of_rank, range(case.sizes.pipeline))
    return max(map(_step_of_rank, ranks), key=lambda one: one.seconds)


def _step_of_rank(case: Case) -> StepEstimate:
    tokens = case.sequences * case.sizes.data * case.cfg.train.seq_len
    flops = float(tokens * case.flops_per_token)
    peak = case.gpu.bf16 if case.product_bytes == 2 else case.gpu.fp32
    own = tokens * (_own_flops(case) + _again(case))
    compute = own / (peak * achieved(case) * case.stage_devices)
    compute += _moved(case) / case.gpu.bandwidth
    collectives = collective_costs(case)
    overlapping = sum(one.seconds for one in collectives if one.hidden)
    waited = sum(one.seconds for one in collectives if not one.hidden)
    ends = sum(one.ends for one in collectives if one.hidden)
    return StepEstimate(
        compute,
        _optimizer(case, peak),
        max(ends, overlapping - compute) + waited,
        idle(case) * (compute + waited),
        collectives,
        flops,
        peak * case.devices,
    )


def _own_flops(case: Case) -> float:
    """Return the FLOPs per token of a rank of a pipeline; all layers count the same."""
    head = _head_flops(case)
    blocks = (case.flops_per_token - head) * case.own_blocks / case.arch.n_layers
    return blocks + (head if case.last else 0)


def _head_flops(case: Case) -> int:
    # 6 per trained weight; 4 without the gradient of a frozen one.
    return (4 if case.adapter else 6) * case.arch.vocab_size * case.arch.dim


def achieved(case: Case) -> float:
    """Return the fraction of the bf16 peak (fp32: of the fp32 peak) that compute should reach."""
    share = ACHIEVED[case.gpu.kind][case.compiled]
    return share * FP8 if case.precision is Precision.FP8 else share


def _moved(case: Case) -> float:
    """Return the bytes that the passes of a step move through a GPU's memory, beside its products.

    0 on a CPU, for which `ACHIEVED` includes it.
    """
    if case.gpu.kind == "cpu":
        return 0.0
    blocks = case.own_blocks * kept_by_block(case)
    logits = case.product_bytes * case.tokens * case.arch.vocab_size // case.sizes.tensor
    logits = logits if case.last else 0
    return case.accumulation * (PASSES * blocks + LOGIT_PASSES * logits)


def _again(case: Case) -> float:
    """Return the FLOPs per token that remat adds on a rank of a pipeline.

    Full remat repeats all of the forward pass of blocks, selective remat about half.
    """
    train = case.cfg.train
    if train.remat == "none":
        return 0.0
    # A third of the FLOPs of trained weights, half of those of frozen ones.
    forward = 2 if case.adapter else 3
    blocks = _own_flops(case) - (_head_flops(case) if case.last else 0)
    return blocks / forward * (1.0 if train.remat == "full" else 0.5)


def _optimizer(case: Case, peak: float) -> float:
    """Return the seconds of the optimizer step.

    AdamW is bound by memory bandwidth: per weight it reads weight, gradient and two moments, and
    writes all but the gradient, 7 numbers in total. Muon moves about the same. State of 8 bits is
    restored and rounded besides. All devices wait for the one that orthogonalises most.
    """
    numbers = 7 * case.weight_bytes * case.held(case.trained)
    small = case.held(weight for weight in case.weights if weight.optimizer == eight_bit.NAME)
    moved = (numbers + OF_8_BITS * small) / case.gpu.bandwidth
    if case.muon is None:
        return moved
    loads = Counter[int]()
    for matrix in case.matrices:
        loads[matrix.assigned_rank] += matrix.flops
    iterations = len(POLYNOMIALS) * max(loads.values(), default=0)
    return moved + iterations / (peak * NEWTON_SCHULZ)


@dataclass(frozen=True)
class RunEstimate:
    """The estimated duration of the whole run."""

    seconds: float
    """Seconds of all steps and evaluations, at most those of `train.budget`."""
    slices: int | None
    """Number of Slurm jobs of `launch.time` that the run takes; None if there is no time limit, or
    if the limit leaves no time to train."""


def seconds_of(case: Case, one: StepEstimate) -> float:
    """Return the seconds of all steps and evaluations, given the estimate of a step at the end.

    Evaluations are forward passes, with a third of the FLOPs of a step. Saves overlap with
    training and are not counted.
    """
    train, stages = case.cfg.train, case.step_sizes
    tokens = stages.tokens_before(case.steps)
    per_token = one.seconds / stages.batch_tokens(case.steps - 1)
    often = case.steps // train.eval_every if train.eval_every else 1
    return per_token * (tokens + (often + 1) * train.eval_tokens / 3)


def run_of(case: Case, one: StepEstimate) -> RunEstimate:
    """Return the estimate of the run, given that of a step at its end."""
    total, budget = seconds_of(case, one), case.cfg.train.budget
    if budget is not None:
        total = min(total, budget_seconds(budget))
    limit = case.cfg.launch.time_limit
    if limit is None:
        return RunEstimate(total, None)
    usable = limit - LEAD_SECONDS - START_SECONDS
    return RunEstimate(total, math.ceil(total / usable) if usable > 0 else None)
