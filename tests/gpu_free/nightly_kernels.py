"""Kernels of the compiled step compile for an H100 and fit it; `dtt plan` estimates its memory.

Takes minutes, and needs Triton, so pytest runs it only when it is named:
`./env.sh pytest tests/gpu_free/nightly_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest
from serving import Ask, asking
from step_cases import CASES

if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
    pytest.skip("needs triton (pip install -e '.[triton]') and g++", allow_module_level=True)

SHARED_MEMORY = 232_448
"""Bytes of shared memory that a block of an H100 can use: 227 KiB."""
STACK = {"head-64": 0, "head-128": 200, "head-192": 600, "head-256": 600, "head-320": 400}
"""Bytes of stack of a thread, for spilled registers, that FlexAttention's kernels take at most. All
others have none."""


@pytest.fixture(scope="module")
def resources() -> Iterator[Ask]:
    with asking("machine_code.py") as ask:
        yield ask


@pytest.mark.parametrize("case", dict.fromkeys((*CASES, *STACK)))
def test_kernels_compile_fit_and_hardly_spill(resources: Ask, case: str) -> None:
    kernels = resources(case)
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["stack"] <= STACK.get(case, 0), kernel


def test_a_kernel_that_takes_too_much_shared_memory_is_found(resources: Ask) -> None:
    assert max(one["shared"] for one in resources("pipelined head-320")) > SHARED_MEMORY


def test_a_kernel_of_the_backward_pass_that_does_not_fit_is_found_in_the_forward_pass(
    resources: Ask,
) -> None:
    assert resources(f"limit {SHARED_MEMORY}")["failure"] == ""
    # Without pipelining, FlexAttention's kernels take 49,152 bytes, and 98,304 backward.
    found = resources("limit 60000")
    assert found["failure"].startswith("OutOfResources: out of resource: shared memory")
    attention = [name for name in found["kernels"] if "tem_fused" in name]
    assert len(attention) == 1
    assert "backward" not in attention[0]


@pytest.fixture(scope="module")
def ratio() -> Iterator[Ask]:
    with asking("peak_memory.py") as ask:
        yield ask


@pytest.mark.parametrize(
    "case",
    [
        "gpt2-124m 32 1024 1 optim.type=adamw train.remat=full",
        "llama3.2-1b 8 2048 8 optim.type=muon train.remat=selective",
        "llama3-8b 1 4096 1 optim.type=adamw train.remat=none",
    ],
)
def test_the_plan_of_a_step_is_near_its_traced_peak(ratio: Ask, case: str) -> None:
    assert ratio(case) == pytest.approx(1, abs=0.03)
