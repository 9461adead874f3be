"""A number that is not finite ends training before anything is saved."""

from __future__ import annotations

import pytest

from dtt.errors import Diverged, ExitCode
from dtt.train.guard import require_finite


def test_a_finite_record_passes_unchanged() -> None:
    record = {"step": 3, "loss": 2.5, "grad_norm": 0.0}
    assert require_finite(record) is record


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_name_the_number_the_step_and_what_helps(name: str, value: float) -> None:
    record = {"step": 3, "loss": 2.5, "grad_norm": 1.0} | {name: value}
    with pytest.raises(Diverged, match=rf"{name} is {value} at step 3[\s\S]*optim\.lr") as caught:
        require_finite(record)
    assert caught.value.exit_code == ExitCode.DIVERGED == 76
