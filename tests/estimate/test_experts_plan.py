from __future__ import annotations

import pytest

from dtt.config.load import resolve
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.communication import collective_costs

H100 = gpus.find("H100", 8)


def of_mixtral(*keys: str) -> Case:
    """Return Mixtral 8x7B on 8 GPUs, with a layer."""
    cfg = resolve(
        "models/mixtral-8x7b",
        ["model.n_layers=1", "train.seq_len=4096", "train.micro_batch=1",
         "train.global_batch_tokens=32768", "train.precision=bf16", "parallel.replicate=1",
         "optim.type=muon", *keys],
    ).config  # fmt: skip
    assert cfg.model.vocab_size is not None
    return make_case(cfg, H100, 1, 8, cfg.model.vocab_size, 1000)


@pytest.mark.parametrize("layout", ["shard=8", "shard=4 tensor=2", "shard=2 context=4"])
@pytest.mark.parametrize("expert", [1, 2, 8])
def test_each_device_holds_an_eighth_of_the_experts(layout: str, expert: int) -> None:
    keys = (f"parallel.{size}" for size in layout.split())
    case = of_mixtral(*keys, f"parallel.expert={expert}")
    experts = [weight for weight in case.weights if ".experts." in weight.name]
    assert case.held(experts) == sum(weight.numel for weight in experts) // 8


def test_rows_travel_to_their_experts_and_whole_experts_stay_with_muon() -> None:
    costs = {
        one.kind: one.bytes
        for one in collective_costs(of_mixtral("parallel.shard=8", "parallel.expert=8"))
    }
    # 4,096 tokens, two experts each, 4,096 numbers of two bytes, there and back in both passes; an
    # eighth stays.
    assert costs["all-to-all of rows"] == 4 * 2 * 4096 * 4096 * 2 * 7 / 8
    assert "all-gather of weights of experts" not in costs
    attention = 2 * (4096 * 4096 + 1024 * 4096) * 2
    assert costs["Muon's matrices"] <= 2 * attention
    gathered = {one.kind: one.bytes for one in collective_costs(of_mixtral("parallel.shard=8"))}
    # In both passes, in bf16.
    assert gathered["all-gather of weights of experts"] == 2 * 2 * 3 * 8 * 14336 * 4096 * 7 / 8
