from __future__ import annotations

import logging

import pytest
import torch
from support.tables import table
from torch import Tensor, nn

from dtt.base.errors import DamagedError
from dtt.optim.ema import Ema, averages

SHAPES = {"a": (3, 4), "b": (5,)}
USED, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in SHAPES.items()}


@torch.no_grad()
def move(params: dict[str, nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params.values():
        p.add_(torch.randn(p.shape, generator=g))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_it_is_the_average_of_the_definition() -> None:
    params = parameters()
    ema = Ema(table(params), decay=0.9)
    expected = {name: p.detach().double() for name, p in params.items()}
    for t in range(200):
        move(params, t)
        ema.update(USED)
        decay = min(0.9, (1 + t) / (10 + t))
        for name, p in params.items():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach().double()
    found = averages(ema.tensors())
    assert found.keys() == expected.keys()
    for name, average in found.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-5)


def test_without_an_average_in_the_checkpoint_it_starts_from_the_weights_with_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = parameters()
    ema = Ema(table(params), decay=0.99)
    move(params, 0)  # the weights of the checkpoint
    with caplog.at_level(logging.INFO, logger="dtt"):
        ema.restore({"adamw/a/exp_avg": torch.zeros(3, 4)})
    assert "no average of the weights" in caplog.text
    assert equal(averages(ema.tensors()), {name: p.detach() for name, p in params.items()})


def test_the_average_of_another_model_is_refused() -> None:
    other = Ema(table({"a": nn.Parameter(torch.zeros(3, 4))}), decay=0.99)
    with pytest.raises(DamagedError, match="b is present on one side only"):
        Ema(table(parameters()), decay=0.99).restore(other.tensors())


def test_the_parameters_hold_the_average_inside_the_context_and_are_restored() -> None:
    params = parameters()
    before = {name: p.detach().clone() for name, p in params.items()}
    ema = Ema(table(params), decay=0.5)
    move(params, 0)
    moved = {name: p.detach().clone() for name, p in params.items()}
    with ema.swapped():
        assert equal({name: p.detach() for name, p in params.items()}, before)
    assert equal({name: p.detach() for name, p in params.items()}, moved)
    assert equal(averages(ema.tensors()), before)
    with pytest.raises(RuntimeError), ema.swapped():
        raise RuntimeError
    assert equal({name: p.detach() for name, p in params.items()}, moved)
