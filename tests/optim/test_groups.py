"""Every parameter has exactly one optimizer, chosen by its role."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtt.config.optim import AdamWConfig, MuonConfig, OptimConfig
from dtt.optim.groups import build, set_learning_rate

ROLES = {"embed": "embed", "w": "matrix", "norm": "vector", "head": "head"}


def parameters() -> dict[str, nn.Parameter]:
    shapes = {"embed": (8, 4), "w": (4, 4), "norm": (4,), "head": (8, 4)}
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "matrix_owner"), [(MuonConfig(), "muon"), (AdamWConfig(), "adamw")]
)
def test_each_parameter_is_held_once_and_only_matrices_decay(
    config: OptimConfig, matrix_owner: str
) -> None:
    optimizers = build(config, parameters(), ROLES, torch.float32)
    groups = [(o, g) for o, optimizer in optimizers.items() for g in optimizer.param_groups]
    names = sorted(name for _, group in groups for name in group["names"])
    assert names == sorted(ROLES)
    decayed = {(o, name) for o, g in groups if g["weight_decay"] for name in g["names"]}
    assert decayed == {(matrix_owner, "w")}


def test_a_parameter_without_a_role_is_an_error() -> None:
    roles = {name: role for name, role in ROLES.items() if name != "norm"}
    with pytest.raises(ValueError, match="norm"):
        build(AdamWConfig(), parameters(), roles, torch.float32)


def test_all_groups_follow_one_multiplier() -> None:
    optimizers = build(
        MuonConfig(lr=0.2, adamw=AdamWConfig(lr=0.1)), parameters(), ROLES, torch.float32
    )
    set_learning_rate(optimizers, 0.5)
    assert [g["lr"] for g in optimizers["muon"].param_groups] == [0.1]
    assert {g["lr"] for g in optimizers["adamw"].param_groups} == {0.05}
