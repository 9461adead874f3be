"""A step never waits for the GPU, mixes no devices, and has no float64 and no graph break.

The real training step, generation and scoring run on fake CUDA tensors: no GPU is needed. Planted
faults prove that the checks find such mistakes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from faults import FAULTS
from serving import Ask, asking

CASES = [
    "gpt2", "llama", "documents", "muon", "fsdp2", "tensor", "tensor-full-remat", "context",
    "adapter", "experts", "fp8", "fp8-tensor", "fp8-adapter",
]  # fmt: skip
PLANTED = ["host-item-in-mean", "mixed-add-in-loss", "float64-ones-in-loss", "break-print-in-block"]
"""One fault of each kind; nightly_mistakes.py has all others."""


@pytest.fixture(scope="module")
def check() -> Iterator[Ask]:
    """Check a case or a fault by its name."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the hooks of fake CUDA tensors")
    with asking("check.py") as ask:
        yield ask


@pytest.mark.slow(except_for=["llama", "fsdp2"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_in_a_step_slows_a_gpu_down(check: Ask, case: str) -> None:
    assert check(case) == []


@pytest.mark.slow
def test_expert_parallelism_waits_for_the_number_of_rows_alone(check: Ask) -> None:
    # Fake tensors have no numbers, so the step ends there.
    assert check("expert-parallel") == [
        "host waits: DataDependentOutputException: aten._local_scalar_dense.default"
    ]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(check: Ask, name: str) -> None:
    kind = FAULTS[name].kind
    assert any(found.startswith(kind) for found in check(name)), f"no {kind} found"


@pytest.mark.parametrize("how", ["greedy", "sampled", "sampled-longrope", "sampled-experts"])
def test_a_generated_token_of_a_batch_waits_once(check: Ask, how: str) -> None:
    """For the tokens of the step before, and so never in what a CUDA graph would hold."""
    assert check(how) == [
        "1 x host waits: aten.to.dtype_layout in model/generate.py, _start_reading"
    ]


def test_scoring_waits_only_for_inputs_lengths_and_results(check: Ask) -> None:
    assert check("scoring") == [
        # ids, targets and positions of a batch, and its scores
        "4 x host waits: aten._to_copy.default in evaluate/tasks/scorer.py, _scores",
        "2 x host waits: aten._to_copy.default in model/tree_attention.py, <genexpr>",
        # the number of scored tokens: see the comment there
        "1 x host waits: aten.nonzero.default in model/target_scores.py, target_scores",
    ]
