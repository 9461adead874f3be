"""The plan of a pipeline: its order, what its ranks hold, and the shipped runs on many GPUs."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from dtt.config.load import resolve
from dtt.config.shipped import shipped_configs
from dtt.estimate import activations, gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.communication import collective_costs
from dtt.estimate.duration import step_of
from dtt.estimate.gpus import GIB, Gpu
from dtt.estimate.memory import fits, moments

H100 = gpus.find("H100", 8)
CPU = Gpu("CPU", 2**40, 1e12, 1e12, 1e12, 1e12, 1e12, kind="cpu")


def seventy(*keys: str, gpu: Gpu = H100) -> Case:
    """Return Llama 3 70B on 1,024 GPUs: tensor 4, pipeline 8, 5 stages a rank, 16 micro-batches."""
    sizes = ("tensor=4", "pipeline=8", "stages_per_rank=5", "shard=32", "replicate=1")
    cfg = resolve("models/llama3-70b", [
        "train.seq_len=8192", "train.micro_batch=1", "train.global_batch_tokens=4194304",
        "train.precision=bf16", "train.remat=full", "optim.type=adamw",
        *(f"parallel.{size}" for size in sizes), *keys,
    ]).config  # fmt: skip
    assert cfg.model.vocab_size is not None
    return make_case(cfg, gpu, 128, 8, cfg.model.vocab_size, 1000)


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


def test_early_ranks_keep_the_activations_of_more_micro_batches() -> None:
    plain = seventy("parallel.stages_per_rank=1")
    assert [activations.most_waiting(plain.of_rank(rank)) for rank in range(8)] == [
        *range(8, 0, -1)
    ]
    # arXiv 2104.04473: p (1 + (p - 1) / (p v)) micro-batches of v stages are p v + p - 1 passes.
    many = seventy()
    assert activations.most_waiting(many) == 5 * 8 + 8 - 1
    assert activations.idle(plain) == 7 / 16
    assert activations.idle(many) == 7 / 80


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
