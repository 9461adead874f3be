"""`dtt plan` estimates the memory of a step, traced with the kernels of an H100.

Takes minutes, and needs Triton, so pytest runs it only when it is named:
`./env.sh pytest tests/gpu_free/nightly_memory.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest
from serving import Ask, asking

if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
    pytest.skip("needs triton (pip install -e '.[triton]') and g++", allow_module_level=True)


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
