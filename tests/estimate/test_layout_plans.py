"""Plans of many GPUs: pipelines, experts, the shipped runs, and runs whose speed is published."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from dtt.config.load import resolve
from dtt.config.shipped import shipped_configs
from dtt.estimate import activations, duration, gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.communication import collective_costs
from dtt.estimate.duration import step_of
from dtt.estimate.gpus import GIB, Gpu
from dtt.estimate.memory import fits, moments
from dtt.train.precision import Precision

H100 = gpus.find("H100", 8)
CPU = Gpu("CPU", 2**40, 1e12, 1e12, 1e12, 1e12, 1e12, kind="cpu")


def planned(model: str, nodes: int, *keys: str, gpu: Gpu = H100) -> Case:
    """Return the case of a shipped model on nodes of 8 GPUs."""
    common = ["name=x", "train.precision=bf16", "optim.type=adamw"]
    cfg = resolve(f"models/{model}", [*common, *keys], env={}).config
    assert cfg.model.vocab_size is not None
    return make_case(cfg, gpu, nodes, 8, cfg.model.vocab_size, 1000)


def seventy(*keys: str, gpu: Gpu = H100) -> Case:
    """Return Llama 3 70B on 1,024 GPUs: tensor 4, pipeline 8, 5 stages a rank, 16 micro-batches."""
    return planned(
        "llama3-70b", 128, "train.seq_len=8192", "train.micro_batch=1",
        "train.global_batch_tokens=4194304", "train.remat=full", "parallel.tensor=4",
        "parallel.pipeline=8", "parallel.stages_per_rank=5", "parallel.shard=32",
        "parallel.replicate=1", *keys, gpu=gpu,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "stages", "count"), [(2, 2, 2), (4, 3, 8), (8, 5, 32)])
def test_the_passes_that_wait_are_those_of_the_interleaved_order_of_torch(
    ranks: int, stages: int, count: int
) -> None:
    sizes = (f"pipeline={ranks}", f"stages_per_rank={stages}", f"shard={256 // ranks}")
    keys = [f"parallel.{size}" for size in sizes]
    keys.append(f"train.global_batch_tokens={256 // ranks * count * 8192}")
    one = seventy("parallel.layers_per_stage=null", *keys)
    for rank in range(ranks):
        schedule: Any = SimpleNamespace(
            n_local_stages=stages, pp_group_size=ranks, _n_microbatches=count,
            microbatches_per_round=ranks,
        )  # fmt: skip
        torchs = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)
        done = [
            a.computation_type for a in torchs if a is not None and a.microbatch_index is not None
        ]
        steps = (1 if kind is schedules.FORWARD else -1 for kind in done)
        assert activations.most_waiting(one.of_rank(rank)) == max(accumulate(steps))


def test_ranks_hold_the_model_once() -> None:
    one = seventy("parallel.layers_per_stage=null")
    names = Counter(w.name for rank in range(8) for w in one.of_rank(rank).weights)
    assert names == Counter(w.name for w in one.all_weights)
    assert [one.of_rank(rank).own_blocks for rank in range(8)] == [10] * 8


@pytest.mark.parametrize(
    ("rank", "peak", "received"), [(0, 24.279, 367.88), (3, 19.018, 323.46), (7, 20.284, 350.58)]
)
def test_a_rank_of_70b_holds_and_receives_what_a_trace_of_it_does(
    rank: int, peak: float, received: float
) -> None:
    """The figures, in GiB and GB, are those of tests/support/simulated_ranks.py."""
    one = seventy(gpu=CPU).of_rank(rank)
    most = max(moments(one), key=lambda moment: moment.total)
    held = most.total - most.parts["framework"] - most.parts["batches"]
    assert held / GIB == pytest.approx(peak, rel=0.05)
    assert sum(e.bytes for e in collective_costs(one)) / 1e9 == pytest.approx(received, rel=1e-3)


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
@pytest.mark.parametrize(("name", "nodes"), [("", 8), ("-256gpus", 32), ("-1024gpus", 128)])
def test_the_shipped_runs_on_many_gpus_fit_into_80_gb(model: str, name: str, nodes: int) -> None:
    cfg = resolve(shipped_configs() / "pretrain" / f"{model}{name}.yaml", [], env={}).config
    assert cfg.model.vocab_size is not None
    one = make_case(cfg, H100, cfg.launch.nodes, 8, cfg.model.vocab_size, cfg.train.steps)
    assert (one.devices, fits(one)) == (8 * nodes, True)
    # The estimate of a step that does not wait for the network for long.
    assert step_of(one).mfu > 0.4


def of_mixtral(*keys: str) -> Case:
    """Return Mixtral 8x7B on 8 GPUs, with a layer."""
    return planned(
        "mixtral-8x7b", 1, "model.n_layers=1", "train.seq_len=4096", "train.micro_batch=1",
        "train.global_batch_tokens=32768", "parallel.replicate=1", "optim.type=muon", *keys,
    )  # fmt: skip


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


ONE = ["parallel.shard=8", "train.remat=selective", "train.micro_batch=2"]
LONG = ["train.remat=full", "train.micro_batch=1", "train.global_batch_tokens=262144"]
OF_405B = [
    "model.dim=16384", "model.n_layers=126", "model.n_heads=128", "model.ffn_dim=53248",
    "parallel.shard=8", "parallel.tensor=8", "parallel.pipeline=8", "parallel.reduce=last",
    "train.remat=full", "train.micro_batch=1", "train.global_batch_tokens=2097152",
]  # fmt: skip


def case_of(model: str, gpus_used: int, precision: Precision, *keys: str) -> Case:
    case = planned(model, gpus_used // 8, "train.seq_len=8192", "model.vocab_size=128256", *keys)
    return replace(case, precision=precision)


@pytest.mark.parametrize(
    ("like", "tokens_per_second", "case"),
    [
        (
            duration.NODE, 6667,
            ("llama3.1-8b", 8, Precision.BF16, *ONE, "train.global_batch_tokens=131072"),
        ),
        (
            duration.NODES, 6514,
            ("llama3.1-8b", 128, Precision.BF16, "parallel.shard=128", *ONE[1:],
             "train.global_batch_tokens=2097152"),
        ),
        (
            duration.CONTEXT_2, 2540,
            ("llama3.1-8b", 8, Precision.FP8, *LONG, "parallel.shard=4", "parallel.context=2",
             "train.seq_len=65536"),
        ),
        (
            duration.CONTEXT_4, 1071,
            ("llama3.1-8b", 8, Precision.FP8, *LONG, "parallel.shard=2", "parallel.context=4",
             "train.seq_len=131072"),
        ),
        (duration.STAGES, 100, ("llama3-70b", 512, Precision.FP8, *OF_405B)),
        (
            duration.INTERLEAVED, 128,
            ("llama3-70b", 512, Precision.FP8, *OF_405B, "parallel.stages_per_rank=2"),
        ),
    ],
)  # fmt: skip
def test_shares_are_those_of_the_published_figures(
    like: duration.Published, tokens_per_second: float, case: tuple[str, int, Precision]
) -> None:
    found = case_of(*case)
    step = step_of(found)
    tokens = found.step_sizes.batch_tokens(found.steps - 1) / found.devices
    assert tokens_per_second / (tokens / step.seconds) == pytest.approx(like.share, abs=0.005)
    # The slowest of the parts counts: a pipeline's for interleaved stages.
    slowest = duration.slowest_like(found)
    assert slowest is not None
    assert slowest.share <= like.share


def test_one_device_has_no_range() -> None:
    one = planned("llama3.1-8b", 1, "train.seq_len=8192")
    assert duration.slowest_like(replace(one, gpus_per_node=1)) is None


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    case = case_of("llama3.1-8b", 8, Precision.BF16, *ONE, "train.global_batch_tokens=131072")
    # The embedding and the first block: 0.74B weights in 2 bytes, and their gradients in 4, of
    # which a device receives 7/8 with 80 % of 450 GB/s.
    seconds = 0.7434e9 * (2 + 4) * 7 / 8 / (0.8 * 450e9)
    assert step_of(case).exposed == pytest.approx(seconds, rel=0.01)
