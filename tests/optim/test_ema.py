from __future__ import annotations

import logging
import math

import pytest
import torch
from support.tables import table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_half_of_it_comes_from_the_last_half_life() -> None:
    params = {"a": nn.Parameter(torch.zeros(1))}
    ema = Ema(table(params), decay=0.99)
    for _ in range(2000):  # beyond the warm-up, which ends where (1 + t) / (10 + t) = 0.99
        ema.update(USED)
    with torch.no_grad():
        params["a"].fill_(1.0)
    for _ in range(round(math.log(2) / (1 - 0.99))):
        ema.update(USED)
    assert averages(ema.tensors())["a"].item() == pytest.approx(0.5, abs=0.01)


def test_a_skipped_step_changes_no_bit_of_it() -> None:
    runs = []
    for skips in (False, True):
        params = parameters()
        ema = Ema(table(params), decay=0.999)
        for step in range(6):
            move(params, step)
            ema.update(USED)
            if skips:
                ema.update(SKIPPED)
        runs.append({name: t.clone() for name, t in ema.tensors().items()})
    assert equal(*runs)


def test_it_continues_bit_for_bit_from_its_tensors() -> None:
    params = parameters()
    ema = Ema(table(params), decay=0.99)
    for step in range(5):
        move(params, step)
        ema.update(USED)
    kept = {name: t.clone() for name, t in ema.tensors().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    restored = Ema(table(resumed), decay=0.99)
    restored.restore(kept)
    for step in range(5, 9):
        for p, e in ((params, ema), (resumed, restored)):
            move(p, step)
            e.update(USED)
    assert equal(ema.tensors(), restored.tensors())


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


def test_frozen_parameters_are_not_averaged() -> None:
    params = parameters()
    params["b"].requires_grad_(False)
    assert averages(Ema(table(params), decay=0.9).tensors()).keys() == {"a"}


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_update_never_waits_for_the_device() -> None:
    ema = Ema(table(parameters()), decay=0.9)
    with Reads() as reads:
        ema.update(USED)
        ema.update(SKIPPED)
        assert reads.count == 0
        assert torch.ones(()).item() == 1.0
    assert reads.count == 1
