from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.config.train import TrainConfig
from dtt.estimate import case
from dtt.launch import checks
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.mesh_divisibility import check_layout, check_mesh
from dtt.model.scaling import scaled
from dtt.train import run_plan


def arch(**changes: object) -> Architecture:
    config = ModelConfig(**{"dim": 96, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 256, **changes})
    return families.get(config.family).architecture(config, 1000, 64)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (Sizes(tensor=3), ["n_kv_heads 4", "ffn_dim 256", "vocab_size 1024", "64 tokens"]),
        (Sizes(tensor=8), ["n_heads 12", "n_kv_heads 4"]),
        (Sizes(context=3), ["64 tokens of a sequence are not a multiple of 2 x context 3"]),
        (
            Sizes(context=16, tensor=4),
            ["64 tokens of a sequence are not a multiple of 2 x context"],
        ),
    ],
)
def test_all_indivisible_sizes_are_reported_in_one_error(sizes: Sizes, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_mesh(sizes, arch(), TrainConfig(seq_len=64))
    reported = str(error.value)
    assert all(name in reported for name in named)
    assert reported.count("multiple of") == len(named)


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        (Sizes(tensor=8), "parallel.tensor=4 parallel.context=1"),
        (Sizes(context=3, tensor=2), "parallel.tensor=2 parallel.context=2"),
    ],
)
def test_the_suggested_sizes_are_the_largest_that_fit(sizes: Sizes, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        check_mesh(sizes, arch(), TrainConfig(seq_len=64))


@pytest.mark.parametrize(
    "sizes", [Sizes(), Sizes(1, 7, 5, 1, 1), Sizes(tensor=4), Sizes(context=8, tensor=4)]
)
def test_divisible_sizes_pass(sizes: Sizes) -> None:
    check_mesh(sizes, arch(), TrainConfig(seq_len=64))


def test_every_context_of_a_schedule_must_divide() -> None:
    train = TrainConfig(seq_len=64, context_schedule=((0, 4), (10, 64)))
    check_mesh(Sizes(tensor=4), arch(), train)
    with pytest.raises(ConfigError, match=r"train\.context_schedule") as error:
        check_mesh(Sizes(context=2, tensor=4), arch(), train)
    assert "4 tokens" in str(error.value)


def test_learned_positions_must_divide() -> None:
    model = {"family": "gpt2", "n_kv_heads": None, "max_seq_len": 65}
    with pytest.raises(ConfigError, match="max_seq_len 65"):
        check_mesh(Sizes(tensor=2), arch(**model), TrainConfig(seq_len=64))


@pytest.mark.parametrize(
    ("arguments", "sizes", "why"),
    [
        (["model.family=llama", "model.n_kv_heads=1"], Sizes(tensor=2), "n_kv_heads 1 is not"),
        (
            ["model.family=qwen3_moe", "parallel.expert=3"],
            Sizes(shard=2),
            "shard x context x tensor is 2",
        ),
    ],
)
def test_every_start_plan_and_submission_refuses_the_same_layouts(
    arguments: list[str], sizes: Sizes, why: str
) -> None:
    cfg = resolve(None, arguments, env={}).config
    with pytest.raises(ConfigError, match=why):
        check_layout(cfg, sizes, scaled(cfg, 1000).arch)
    # The one function that all three call; none of them checks a part of it by itself.
    for module in (run_plan, case, checks):
        assert module.check_layout is check_layout
        assert not {"check_mesh", "check_stages", "check_experts"} & vars(module).keys()
