"""AdamW with cautious decay: against a plain reference, on shards, and where a step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.tables import table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.mesh.sharding import from_local, local, local_shard
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig
from dtt.optim.adamw_optimizers import ExactAdamW
from dtt.optim.rounding import StochasticRounding

SHAPES = ((16, 8), (7, 12), (5, 3))
LR, DECAY, STEPS = 0.02, 0.5, 6
CONFIG = AdamWConfig(lr=LR, weight_decay={"value": DECAY, "cautious": True})


def random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [nn.Parameter(random(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]


def make(params: Sequence[Tensor], config: AdamWConfig = CONFIG, **how: Any) -> torch.optim.AdamW:
    named: Any = {f"layers.0.p{i}.weight": p for i, p in enumerate(params)}
    adamw = built.build(config, table(named), RunFacts(1, **how))["adamw"]
    assert isinstance(adamw, torch.optim.AdamW)
    return adamw


def gradient(p: Tensor, step: int, i: int) -> Tensor:
    """The gradient of a step; on several ranks, this rank's part of it."""
    full = random(p.shape, 1000 * (step + 1) + i)
    if not hasattr(p, "device_mesh"):
        return full.to(p.dtype)
    part = full[local_shard(p).box.slices].clone()
    return from_local(part, p.device_mesh, p.placements, full.shape)


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = gradient(p, step, i)
        optimizer.step()


def reference() -> list[Tensor]:
    """AdamW with cautious decay as in arXiv 2510.12402, algorithm 1, in float64."""
    results = []
    for i, w in enumerate(p.detach().double() for p in weights()):
        mean, square = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(STEPS):
            g = random(w.shape, 1000 * (step + 1) + i).double()
            mean = 0.9 * mean + 0.1 * g
            square = 0.95 * square + 0.05 * g * g
            corrected = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.95 ** (step + 1))
            u = corrected[0] / (corrected[1].sqrt() + 1e-8)
            w = w - LR * (u + DECAY * (u * w >= 0) * w)
        results.append(w)
    return results


def test_steps_equal_those_of_the_published_algorithm() -> None:
    params = weights()
    optimizer = make(params)
    assert isinstance(optimizer, ExactAdamW)
    train(optimizer, params, range(STEPS))
    for p, expected in zip(params, reference(), strict=True):
        torch.testing.assert_close(p.double(), expected, atol=1e-5, rtol=1e-5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY]


@pytest.mark.parametrize("rounding", [None, StochasticRounding(0)], ids=["nearest", "stochastic"])
def test_bf16_weights_decay_by_less_than_they_can_represent_in_one_step(
    rounding: StochasticRounding | None,
) -> None:
    """Decay and update are added in fp32: neither is rounded away on its own."""
    params = weights(torch.bfloat16)
    optimizer = make(params, rounding=rounding)
    assert isinstance(optimizer, ExactAdamW)
    train(optimizer, params, range(STEPS))
    for p, expected in zip(params, reference(), strict=True):
        torch.testing.assert_close(p.double(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_a_skipped_step_changes_no_bit(dtype: torch.dtype, value: float) -> None:
    params = weights(dtype)
    params[0].data[0, 0] = -0.0
    rounding = StochasticRounding(0) if dtype == torch.bfloat16 else None
    optimizer = make(params, rounding=rounding)
    train(optimizer, params, range(2))

    def bits() -> list[bytes]:
        held = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
        return [t.view(torch.uint8).numpy().tobytes() for t in held if t.ndim]

    before = bits()
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    for p in params:
        p.grad = torch.full_like(p, value)
    optimizer.step()
    assert bits() == before
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    assert bits() != before


def trained(world: World, layout: str) -> list[tuple[Any, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    if layout == "fsdp":
        holder = nn.ParameterList(weights())
        fully_shard(holder, mesh=mesh)
        params: list[Any] = list(holder.parameters())
    else:
        cut = [distribute_tensor(p.detach(), mesh, [Shard(1)]) for p in weights()]
        params = [nn.Parameter(part) for part in cut]
    train(make(params), params, range(STEPS))
    return [(local_shard(p).box, local(p).detach().numpy()) for p in params]


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_shards_are_updated_as_the_complete_weights(layout: str) -> None:
    params = weights()
    train(make(params), params, range(STEPS))
    for of_rank in on_ranks(2, trained, layout):
        for p, (box, value) in zip(params, of_rank, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), p.detach()[box.slices])
