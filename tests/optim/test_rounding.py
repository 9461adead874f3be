"""Stochastic rounding is right on average, so that updates too small for bf16 are not lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.tables import table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.mesh.sharding import local
from dtt.optim import built, groups
from dtt.optim.adamw import AdamWConfig
from dtt.optim.muon.variant import MuonConfig
from dtt.optim.rounding import StochasticRounding

DRAWS = 2**18


def rounded(value: Tensor, key: str = "w", step: int = 0, seed: int = 0) -> Tensor:
    target = torch.empty_like(value, dtype=torch.bfloat16)
    StochasticRounding(seed, step).write(target, value, key)
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0077, 3.14159e-5, -2.7e-20, 6.02e23, 1e-40])
def test_the_mean_is_the_number_itself(value: float) -> None:
    exact = torch.full((DRAWS,), value)
    found = rounded(exact).double()
    below, above = found.min().item(), found.max().item()
    exact_value = exact[0].double().item()
    assert below < exact_value < above
    assert set(found.unique().tolist()) == {below, above}
    assert above - below <= 2**-7 * abs(exact_value) or abs(exact_value) < 2e-38
    share = (exact_value - below) / (above - below)  # of those that should be rounded up
    deviation = (above - below) * math.sqrt(share * (1 - share) / DRAWS)
    assert abs(found.mean().item() - exact_value) < 5 * deviation


def test_values_representable_in_bf16_are_unchanged() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    kept = rounded(every.float())
    same = kept.view(torch.int16) == every.view(torch.int16)
    assert (same | every.isnan()).all()
    assert kept[every.isnan()].isnan().all()
    # NVIDIA's own NaN, to which nothing can be added.
    assert rounded(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)).isnan().all()


def test_random_bits_depend_on_seed_step_and_name_alone() -> None:
    values = torch.linspace(1.0, 2.0, 1000)
    first = rounded(values, "a", step=3, seed=1)
    torch.manual_seed(5)
    assert torch.equal(rounded(values, "a", step=3, seed=1), first)
    for key, step, seed in (("b", 3, 1), ("a", 4, 1), ("a", 3, 2)):
        assert not torch.equal(rounded(values, key, step, seed), first)


CONFIGS = {
    "adamw": AdamWConfig(weight_decay=0.0),
    "muon": MuonConfig(weight_decay=0.0, scale="spectral"),
}


def train(kind: str, weight: Tensor, rounding: StochasticRounding | None, steps: int = 200) -> Any:
    """`weight` after steps with gradients that are always the same, each at a rate of 1e-5."""
    parameter = nn.Parameter(weight)
    optimizer = built.build(CONFIGS[kind], table({"w": parameter}), RunFacts(1, rounding=rounding))[
        kind
    ]
    groups.set_learning_rate({kind: optimizer}, 1e-5 / optimizer.param_groups[0]["peak_lr"])
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        parameter.grad = gradient.to(weight.dtype)
        if rounding is not None:
            rounding.step = step
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("kind", CONFIGS)
def test_tiny_updates_count_on_average_and_are_all_lost_without(kind: str) -> None:
    before = torch.ones(128, 128)
    change = train(kind, before.clone(), None) - before  # what should come of it
    narrow = before.bfloat16()
    assert torch.equal(train(kind, narrow.clone(), None), narrow)
    found = (train(kind, narrow.clone(), StochasticRounding(0)) - narrow).float()
    share = (found * change).sum() / change.square().sum()  # of the change, in its direction
    spacing = 2**-8  # of bf16 below 1; above it is twice that
    steps = 2 * spacing * change.abs()  # the variance that rounding may add, to each
    deviation = (steps * change.square()).sum().sqrt() / change.square().sum()
    assert abs(share - 1) < 4 * deviation
    assert deviation < 0.1


def on_a_mesh(world: World) -> dict[str, list[list[float]]]:
    """This rank's part after one step on weights that are all one, with the same gradients: two
    ranks hold each half."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for kind, config in CONFIGS.items():
        rounding = StochasticRounding(0)
        cut = distribute_tensor(torch.ones(8, 64).bfloat16(), mesh, [Replicate(), Shard(0)])
        parameter = nn.Parameter(cut)
        (optimizer,) = built.build(
            config, table({"w": parameter}), RunFacts(1, rounding=rounding)
        ).values()
        parameter.grad = distribute_tensor(
            torch.ones(8, 64).bfloat16(), mesh, [Replicate(), Shard(0)]
        )
        optimizer.step()
        found[kind] = local(parameter.detach()).tolist()
    return found


def test_replicas_round_alike_and_parts_each_in_their_own_way() -> None:
    ranks = on_ranks(4, on_a_mesh)
    for kind in CONFIGS:
        first, second = ranks[0][kind], ranks[1][kind]
        assert [rank[kind] for rank in ranks] == [first, second, first, second]
        assert first != second


SLOW = {
    "adamw exp_avg_sq": (AdamWConfig(betas=(0.9, 0.999)), "exp_avg_sq"),
    "adamw exp_avg": (AdamWConfig(betas=(0.99, 0.95)), "exp_avg"),
    "muon momentum": (MuonConfig(momentum=0.99), "momentum"),
    "muon row_moment": (MuonConfig(normuon_beta2=0.999), "row_moment"),
}
"""Optimizers with a running average whose steps are smaller than bf16 can represent."""


@pytest.mark.parametrize("weights", [False, True], ids=["to nearest", "stochastic"])
@pytest.mark.parametrize("name", SLOW)
def test_running_averages_of_a_slow_decay_agree_with_those_of_fp32(
    name: str, *, weights: bool
) -> None:
    """They grow in the first steps, and fall again with gradients of a thousandth."""
    config, key = SLOW[name]

    def state(dtype: torch.dtype) -> Tensor:
        parameter = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        rounding = StochasticRounding.of(0, dtype, weights=weights)
        (optimizer,) = built.build(
            config, table({"w": parameter}), RunFacts(1, rounding=rounding)
        ).values()
        groups.set_learning_rate({"": optimizer}, 1e-6)
        generator = torch.Generator().manual_seed(0)
        for step in range(120):
            gradient = torch.rand(64, 64, generator=generator) * (1.0 if step < 20 else 1e-3)
            parameter.grad = gradient.to(dtype)
            if rounding is not None:
                rounding.step = step
            optimizer.step()
        found: Tensor = optimizer.state[parameter][key]
        return found.double()

    assert abs(state(torch.bfloat16).mean() / state(torch.float32).mean() - 1) < 0.02


def test_row_moments_round_alike_where_ranks_hold_parts_of_a_row() -> None:
    first, second = on_ranks(2, row_moments)
    assert first == second


def row_moments(world: World) -> list[list[float]]:
    """NorMuon's second moments of this rank, which holds half of the columns."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    rounding = StochasticRounding(0)
    whole = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    (optimizer,) = built.build(
        MuonConfig(normuon_beta2=0.999), table({"w": parameter}), RunFacts(1, rounding=rounding)
    ).values()
    parameter.grad = distribute_tensor(whole, mesh, [Shard(1)])
    optimizer.step()
    found: list[list[float]] = local(optimizer.state[parameter]["row_moment"]).tolist()
    return found
