"""Every Triton kernel of a step compiles for an H100, and fits it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

sys.path.append(str(Path(__file__).parent))
from serving import Ask, asking

if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
    pytest.skip("needs triton (pip install -e '.[triton]') and g++", allow_module_level=True)

SHARED_MEMORY = 232_448
"""Bytes of shared memory that a block of an H100 can use: 227 KiB."""
STACK = {"head-128": 200, "head-192": 1500, "head-256": 1500, "head-320": 2000}
"""Bytes of stack of a thread, for spilled registers, that FlexAttention's kernels take at most. All
others have none."""


@pytest.fixture(scope="module")
def resources() -> Iterator[Ask]:
    with asking("machine_code.py") as ask:
        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "windows", *STACK])
def test_kernels_compile_fit_and_hardly_spill(resources: Ask, case: str) -> None:
    kernels = resources(case)
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        allowed = STACK.get(case, 300) if "flex" in kernel["kernel"] else 0
        assert kernel["stack"] <= allowed, kernel
