"""AdamW with moments of 8 bits: its codes, its state on any layout, and what it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.tables import table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtt.base.errors import ConfigError, DamagedError
from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig, AdamWSettings
from dtt.optim.adamw_optimizers import Quantiser, code_book, maxima, spread
from dtt.optim.muon.variant import MuonConfig
from dtt.optim.rounding import StochasticRounding
from dtt.train.state import load_optimizers, optimizer_tensors

SMALL = AdamWConfig(lr=0.01, state="8bit", weight_decay={"value": 0.1, "cautious": True})
SHAPE = (9, 704)
"""Three blocks to a row, the last of them not full; of four ranks, one gets no rows, or all get 176
columns. torch's kernel rounds the last numbers of a tensor differently if they fill no vector."""
NAME = "layers.0.p.weight"


def number(code: int, *, signed: bool) -> float:
    """Decode a byte as section 1.3 of arXiv 2110.02861 says.

    A sign bit (of an unsigned code, one more bit of the fraction), zeros that count the exponent, a
    1, and the fraction: the middle of one of the equal parts of [0.1, 1].
    """
    bits = format(code, "08b")
    sign, bits = (-1.0 if bits[0] == "1" else 1.0, bits[1:]) if signed else (1.0, bits)
    fraction = bits.lstrip("0")[1:]
    # The two strings without an exponent below 7 or without an indicator are 0 and 1.
    if "1" not in bits or len(bits) - 1 - len(fraction) > 6:
        return 1.0 if "1" in bits or sign < 0 else 0.0
    part = (int(fraction, 2) if fraction else 0) + 0.5
    exponent = len(bits) - 1 - len(fraction)
    return sign * 10.0**-exponent * (0.1 + 0.9 * part / 2 ** len(fraction))


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_is_that_of_the_paper(signed: bool) -> None:
    expected = sorted(number(code, signed=signed) for code in range(256))
    assert code_book(signed=signed).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_gets_the_nearest_code_of_its_block(signed: bool) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).pow(3)
    values = values if signed else values.abs()
    values[3], values[4, 5], values[5, 300] = 0.0, 1e4, 1e-30
    values[6] *= 1e-30
    quantiser = Quantiser(torch.float32, torch.device("cpu"), signed=signed)
    scale = maxima(values, 0, 3)
    assert torch.equal(scale[:, 2], values[:, 512:].abs().amax(1))
    restored = quantiser.restore(quantiser.codes(values.clone(), scale), scale)
    book = torch.tensor([number(code, signed=signed) for code in range(256)])
    # Of a second moment, nothing becomes 0 that is not in a block of zeros.
    choices = (book if signed else book[book > 0]) * spread(scale, 0, SHAPE[1])[..., None]
    nearest = (choices - values[..., None]).abs().amin(-1)
    torch.testing.assert_close((restored - values).abs(), nearest, rtol=1e-3, atol=1e-9)
    assert not restored[3].any()
    assert signed or bool((restored[values.sum(1) > 0] > 0).all())


def gradient(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3)


def make(p: Tensor, **how: Any) -> dict[str, torch.optim.Optimizer]:
    found = built.build(SMALL, table({NAME: p}), RunFacts(1, **how))
    assert list(found) == ["adamw8bit"]
    return found


def train(p: Tensor, optimizers: Mapping[str, torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        p.grad = gradient(step).to(p.dtype)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
        optimizers["adamw8bit"].step()


def laid_out(world: World, sizes: tuple[int, ...], placements: tuple[Any, ...]) -> Tensor:
    start = gradient(99)
    if not placements:
        return nn.Parameter(start)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    return nn.Parameter(distribute_tensor(start, mesh, placements))


def whole(p: Tensor, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    tensors = {"p": p.detach(), **optimizer_tensors(optimizers)}
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for key, value in tensors.items()
    }


LAYOUTS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    ((), ()),
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Replicate(), Shard(0))),
)


def states_of_layouts(world: World) -> list[str]:
    """Train on a layout, go on with the next one, and compare with one process."""
    torch.set_num_threads(1)
    expected = []
    alone = laid_out(world, (), ())
    optimizers = make(alone)
    for steps in (range(3), range(3, 6)):
        train(alone, optimizers, steps)
        expected.append(whole(alone, optimizers))
    wrong = []
    for i, layout in enumerate(LAYOUTS):
        p = laid_out(world, *layout)
        optimizers = make(p)
        train(p, optimizers, range(3))
        saved = whole(p, optimizers)
        resumed = laid_out(world, *LAYOUTS[(i + 1) % len(LAYOUTS)])
        restored = make(resumed)
        full = saved["p"]
        if isinstance(resumed, DTensor):
            full = distribute_tensor(full, resumed.device_mesh, resumed.placements)
        resumed.data.copy_(full)
        load_optimizers(restored, {key: value for key, value in saved.items() if key != "p"})
        train(resumed, restored, range(3, 6))
        for found, right in ((saved, expected[0]), (whole(resumed, restored), expected[1])):
            wrong += [f"{layout} {key}" for key in right if not torch.equal(found[key], right[key])]
    return wrong


def test_state_and_weights_are_the_same_bits_on_any_layout() -> None:
    assert on_ranks(4, states_of_layouts) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_a_skipped_step_changes_no_bit(dtype: torch.dtype, value: float) -> None:
    p = nn.Parameter(gradient(99).to(dtype))
    optimizers = make(p, rounding=StochasticRounding(0) if dtype == torch.bfloat16 else None)
    train(p, optimizers, range(2))
    before = whole(p, optimizers)
    only: Any = optimizers["adamw8bit"]
    only.found_inf, p.grad = torch.ones(()), torch.full_like(p, value)
    only.step()
    assert all(torch.equal(before[key], now) for key, now in whole(p, optimizers).items())
    only.found_inf = torch.zeros(())
    train(p, optimizers, range(2, 3))
    assert not torch.equal(before["p"], p)


def test_some_rows_at_a_time_are_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (2**24, 2 * 704):
        monkeypatch.setattr("dtt.optim.adamw_optimizers.CHUNK", chunk)
        p = nn.Parameter(gradient(99))
        optimizers = make(p)
        train(p, optimizers, range(3))
        found.append(whole(p, optimizers))
    assert found[0]["adamw8bit/layers.0.p.weight/step"] == 3
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


def test_only_large_matrices_an_untied_head_and_adapters_have_codes() -> None:
    shapes = {
        "embed.weight": (64, 64), "head.weight": (64, 64), "layers.0.p.weight": (64, 64),
        "layers.0.small.weight": (63, 65), "norm.weight": (8192,),
    }  # fmt: skip
    roles = dict(zip(shapes, ("embed", "head", "matrix", "matrix", "vector"), strict=True))
    params = table({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}, roles)
    small = AdamWSettings(state="8bit")
    for config, coded in (
        (AdamWConfig(state="8bit"), ["head.weight", "layers.0.p.weight"]),
        (MuonConfig(adamw=small), ["head.weight"]),
        (MuonConfig(), None),
    ):
        found = built.build(config, params, RunFacts(1)).get("adamw8bit")
        assert (found and sorted(name for name, _ in built.named(found))) == coded


def test_state_that_does_not_fit_is_refused() -> None:
    p = nn.Parameter(gradient(99))
    optimizers = make(p)
    train(p, optimizers, range(1))
    saved = optimizer_tensors(optimizers)
    path = f"adamw8bit/{NAME}/exp_avg_scale"
    for wrong in (saved[path][:, :2], saved[path][:3], None):
        state = {key: value for key, value in (saved | {path: wrong}).items() if value is not None}
        with pytest.raises(DamagedError):
            load_optimizers(make(p), state)
    wide = built.build(SMALL.model_copy(update={"state": "32bit"}), table({NAME: p}), RunFacts(1))
    of_32_bits = {f"adamw/{NAME}/exp_avg": torch.zeros(SHAPE)}
    for there, here in ((saved, wide), (of_32_bits, make(p))):
        with pytest.raises(ConfigError, match="do not match those of the checkpoint"):
            load_optimizers(here, there)


def test_weights_stay_near_those_of_32_bits() -> None:
    """A regression on noisy data: both end at about the same loss."""
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for state in ("32bit", "8bit"):
        p = nn.Parameter(torch.zeros(64, 64))
        config = AdamWConfig.model_validate({"lr": 0.02, "state": state, "weight_decay": 0.0})
        (optimizer,) = built.build(config, table({NAME: p}), RunFacts(1)).values()
        generator = torch.Generator().manual_seed(0)
        for _ in range(300):
            x = torch.randn(32, 64, generator=generator)
            p.grad = x.T @ (x @ (p - target)).detach() / 32
            optimizer.step()
        losses.append(float((p - target).detach().square().mean()))
    assert losses[1] == pytest.approx(losses[0], abs=0.01)
    assert losses[0] < 0.02
