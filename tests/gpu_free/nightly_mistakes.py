"""All planted mistakes that cost time on a GPU are found; test_checks.py has one of each kind.

`./env.sh pytest -n 0 tests/gpu_free/nightly_mistakes.py`
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from faults import FAULTS
from serving import Ask, asking


@pytest.fixture(scope="module")
def check() -> Iterator[Ask]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the hooks of fake CUDA tensors")
    with asking("check.py") as ask:
        yield ask


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(check: Ask, name: str) -> None:
    kind = FAULTS[name].kind
    assert any(found.startswith(kind) for found in check(name)), f"no {kind} found"
