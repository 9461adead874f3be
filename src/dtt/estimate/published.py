"""Published speeds of runs on several GPUs, as shares of the estimates of the same runs.

An estimate counts FLOPs, bytes and the communication that nothing hides. It is a bound: messages
between computations, slower cards of a node and limits of power make each published run slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtt.estimate.case import Case

TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, GPUs limited to 500 W"


@dataclass(frozen=True)
class Published:
    """A published run."""

    what: str
    share: float
    """Its tokens per second as a fraction of those that are estimated for it.
    tests/estimate/test_published.py computes it again from the published figure."""

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
