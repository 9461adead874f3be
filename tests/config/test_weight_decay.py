"""Weight decay is a number or a horizon; values that are neither are refused before a run."""

from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.weight_decay import parse_decay


@pytest.mark.parametrize(
    "value",
    [0, 0.1, 3, "horizon 0.2", "horizon 2", "horizon 5e-2", "cautious 0.1", "cautious horizon 0.2"],
)
def test_a_number_and_a_horizon_are_accepted_wherever_a_decay_stands(value: float | str) -> None:
    for optimizer in ("muon", "adamw"):
        entry = f"[{{match: '*', weight_decay: {value}}}]"
        arguments = [f"optim.type={optimizer}", f"optim.weight_decay={value}"]
        optim = resolve(None, [*arguments, f"optim.groups={entry}"], env={}).config.optim
        assert optim.weight_decay == optim.groups[0].weight_decay == value
        # Configurations of jobs store numbers as they did before.
        assert isinstance(optim.weight_decay, str if isinstance(value, str) else float)


@pytest.mark.parametrize(
    "value", ["-0.1", "horizon 0", "horizon", "horizon -1", "horizon 20%", "0.1 horizon", "'0.1'",
              "cautious", "horizon cautious 0.1", "Cautious 0.1", ".inf", "true", "horizon 1e999",
              "[0.1]"],
)  # fmt: skip
def test_any_other_value_is_refused_by_the_name_of_its_key(value: str) -> None:
    for key in ("optim.weight_decay", "optim.groups"):
        text = value if key == "optim.weight_decay" else f"[{{match: '*', weight_decay: {value}}}]"
        with pytest.raises(
            ConfigError, match=r"weight_decay: must be a finite number(.|\n)*horizon 0\.2"
        ):
            resolve(None, [f"{key}={text}"], env={})


def test_a_horizon_needs_a_run_of_known_length() -> None:
    entry = "optim.groups=[{match: '*', weight_decay: horizon 0.2}]"
    for key in ("optim.weight_decay=horizon 0.2", entry):
        with pytest.raises(ConfigError, match="specify the weight decay as a number"):
            resolve(None, ["train.budget=6h", key], env={})
    resolve(None, ["train.budget=6h", "optim.weight_decay=0.2"], env={})


def test_a_horizon_is_the_decay_over_which_weights_are_averaged() -> None:
    """Wang & Aitchison, equation 2: the time constant in steps is 1 / (lr * decay)."""
    decay = parse_decay("horizon 0.2").resolve(lr=4e-3, steps=500)
    assert 1 / (4e-3 * decay) == pytest.approx(0.2 * 500)
    assert parse_decay(0.3).resolve(lr=4e-3, steps=None) == 0.3
    with pytest.raises(ValueError, match="number of steps"):
        parse_decay("horizon 0.2").resolve(lr=4e-3, steps=None)
