"""The estimates of runs whose speed others have published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtt.config.load import resolve
from dtt.estimate import duration, gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.duration import step_of
from dtt.train.precision import Precision

ONE = ["parallel.shard=8", "train.remat=selective", "train.micro_batch=2"]
LONG = ["train.remat=full", "train.micro_batch=1", "train.global_batch_tokens=262144"]
OF_405B = [
    "model.dim=16384", "model.n_layers=126", "model.n_heads=128", "model.ffn_dim=53248",
    "parallel.shard=8", "parallel.tensor=8", "parallel.pipeline=8", "train.remat=full",
    "train.micro_batch=1", "train.global_batch_tokens=2097152",
]  # fmt: skip


def case_of(model: str, gpus_used: int, precision: Precision, *keys: str) -> Case:
    fixed = ["name=x", "optim.type=adamw", "train.seq_len=8192", f"launch.nodes={gpus_used // 8}"]
    fixed += ["launch.gpus_per_node=8", "train.precision=bf16"]
    cfg = resolve(f"models/{model}", [*fixed, *keys], env={}).config
    case = make_case(cfg, gpus.GPUS["H100"], gpus_used // 8, 8, 128256, cfg.train.steps)
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
    cfg = resolve("models/llama3.1-8b", ["name=x", "train.seq_len=8192"], env={}).config
    alone = make_case(cfg, gpus.GPUS["H100"], 1, 1, 128256, 10)
    assert duration.slowest_like(alone) is None


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    case = case_of("llama3.1-8b", 8, Precision.BF16, *ONE, "train.global_batch_tokens=131072")
    # The embedding and the first block: 0.74B weights in 2 bytes, and their gradients in 4, of
    # which a device receives 7/8 with 80 % of 450 GB/s.
    seconds = 0.7434e9 * (2 + 4) * 7 / 8 / (0.8 * 450e9)
    assert step_of(case).exposed == pytest.approx(seconds, rel=0.01)
