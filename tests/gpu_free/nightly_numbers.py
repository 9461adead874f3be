"""Loss and gradients of the compiled CUDA step are those of a CPU, and wrong numbers are found.

Takes minutes a case, in Triton's interpreter, so pytest runs it only when it is named:
`./env.sh pytest tests/gpu_free/nightly_numbers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Ask, asking

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def differences() -> Iterator[Ask]:
    with asking("numbers_of_a_step.py") as ask:
        yield ask


CASES = [
    "gpt2", "llama", "qwen3", "documents", "gemma3", "z-loss",
    "adapter",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_a_compiled_step_are_those_of_a_cpu(differences: Ask, case: str) -> None:
    found = differences(case)
    assert found["loss"] < 1e-5
    # GPT-2's gradient of the keys' bias is rounding.
    assert found["gradients"] < (5e-5 if case == "gpt2" else 1e-5)


@pytest.mark.parametrize(
    "fault",
    ["scale", "mask", "terms", "gradient", "norm", "mlp", "gelu", "rsqrt", "sum", "residual"],
)
def test_a_wrong_number_is_found(differences: Ask, fault: str) -> None:
    found = differences(fault)
    assert max(found.values()) > 1e-4
