from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.model import families
from dtt.model.mesh_divisibility import check_experts

DOTS = "model.family=dots1", "model.n_experts=8"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("train.balance_loss=0.1",), "llama has no experts"),
        (("train.router_z_loss=0.1",), "llama has no experts"),
        (("parallel.expert=2",), "llama has no experts"),
        (("model.n_experts=4",), "llama has no n_experts"),
        ((*DOTS, "train.precision=fp8"), "not for stacks of experts"),
        ((*DOTS, "scaling={type: mup, base_dim: 128}"), "muP has no rule for routers"),
        ((*DOTS, "model.n_expert_groups=3"), "3 groups do not divide 8 experts"),
        ((*DOTS, "model.n_expert_groups=8"), "at least two experts"),
        ((*DOTS, "model.expert_groups_per_token=2"), "more than the 1 groups"),
        ((*DOTS, "model.experts_per_token=9"), "only 8 experts"),
        (("model.family=olmoe", "model.n_shared_experts=2"), "olmoe has no n_shared_experts"),
        (
            (*DOTS, "data.type=preference", "objective.type=dpo", "train.balance_loss=0.1"),
            "the loss is per pair",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(keys: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(None, [*keys])


@pytest.mark.parametrize(
    ("expert", "sizes", "why", "fitting"),
    [
        (4, Sizes(shard=2), "shard x context x tensor is 2", 2),
        (3, Sizes(shard=3), "model.n_experts is 8", 1),
        (4, Sizes(replicate=4, tensor=2), "is 2", 2),
    ],
)
def test_experts_are_divided_evenly(expert: int, sizes: Sizes, why: str, fitting: int) -> None:
    cfg = ModelConfig(family="mixtral", n_experts=8)
    arch = families.get("mixtral").architecture(cfg, 300, 64)
    with pytest.raises(ConfigError, match=why) as refused:
        check_experts(expert, sizes, arch)
    assert f"parallel.expert={fitting}" in str(refused.value)
    check_experts(fitting, sizes, arch)
