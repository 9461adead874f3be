"""The average of the weights: a decay, or a decay with a start and a blend."""

from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.averaging import Averaging, parse_averaging
from dtt.config.base import Length
from dtt.config.load import resolve


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.9", Averaging(0.9)),
        ("0.999 from 60%", Averaging(0.999, Length("60%"))),
        ("0.999 from 0.5", Averaging(0.999, Length(0.5))),
        ("0.99 from 300", Averaging(0.99, Length(300))),
        ("0.99 blend 0.6", Averaging(0.99, Length(0), 0.6)),
        ("0.99 from 25% blend 1", Averaging(0.99, Length("25%"), 1.0)),
    ],
)
def test_each_form_is_read(value: str, expected: Averaging) -> None:
    given = resolve(None, [f"train.ema_decay={value}"], env={}).config.train.ema_decay
    assert given is not None
    assert parse_averaging(given) == expected
    assert isinstance(given, float) == (" " not in value)


@pytest.mark.parametrize(
    "value", ["0", "1", "1.0", "0.0", "-0.9", "true", "'0.9'", "0.9 from", "0.9 from 120%",
              "0.9 blend 0", "0.9 blend 1.1", "0.9 blend 0.5 from 3", "[0.9]", ".nan"],
)  # fmt: skip
def test_any_other_is_refused_with_the_forms(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema_decay: must be a number above 0"):
        resolve(None, [f"train.ema_decay={value}"], env={})


def test_a_start_as_a_share_needs_a_run_of_known_length() -> None:
    with pytest.raises(ConfigError, match="specify its start in steps"):
        resolve(None, ["train.budget=6h", "train.ema_decay=0.9 from 60%"], env={})
    resolve(None, ["train.budget=6h", "train.ema_decay=0.9 from 600"], env={})
