"""A pipeline computes what one process computes: gradients, losses, evaluations, answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.tiny_architectures import penalise

from dtt.base.errors import ConfigError
from dtt.base.ranks import Ranks
from dtt.base.targets import IGNORE_INDEX
from dtt.config.model import ModelConfig
from dtt.config.parallel import ParallelConfig, Sizes
from dtt.config.train import TrainConfig
from dtt.data.samples.compatibility import check_batches
from dtt.data.samples.loader import MicroBatch
from dtt.evaluate.tasks.scorer import Generator, Option, Scorer
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import DATA, make_mesh
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.mesh_divisibility import check_stages
from dtt.parallel.apply import apply
from dtt.parallel.pipelining import Pipeline
from dtt.train.objectives.loss_function import loss_function
from dtt.train.pipelined_step import PipelinedPasses
from dtt.train.step import Passes

LAYERS, SEQ_LEN, ROWS = 5, 16, 12
LAYOUTS = {
    "1F1B": ParallelConfig(pipeline=2, replicate=1),
    "interleaved": ParallelConfig(pipeline=2, stages_per_rank=2, replicate=1),
    "uneven": ParallelConfig(pipeline=2, layers_per_stage=(4, 1), replicate=1),
    "four ranks": ParallelConfig(pipeline=4, replicate=1),
    "of shards": ParallelConfig(pipeline=2, shard=2, replicate=1),
    "of tensors": ParallelConfig(pipeline=2, tensor=2, replicate=1),
}


def architecture(**more: Any) -> Architecture:
    config = ModelConfig(dim=32, n_layers=LAYERS, n_heads=4, tie_embeddings=False, **more)
    return families.get("llama").architecture(config, 128, SEQ_LEN)


def micro_batches(rows: int, rank: int, ranks: int) -> list[MicroBatch]:
    """Return this rank's share of 12 rows in micro-batches; some rows have no targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (ROWS, SEQ_LEN + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[1::4] = IGNORE_INDEX
    documents = (torch.arange(SEQ_LEN) >= 6).int().expand(ROWS, -1).contiguous()
    parts = zip(
        *(x[rank::ranks].split(rows) for x in (ids[:, :-1], targets, documents)), strict=True
    )
    return [MicroBatch(*part) for part in parts]


def made(world: World, config: ParallelConfig) -> tuple[Decoder, Passes, Any]:
    """Return a model in fp64 with auxiliary losses, its step and its mesh."""
    torch.set_num_threads(1)
    mesh = make_mesh(Sizes(**{k: max(1, v) for k, v in config.sizes.items()}), world)
    arch = architecture()
    stages = config.stage_layers(arch.n_layers)
    with torch.device("meta"):
        held = stages[mesh.index("pipeline") :: mesh.size("pipeline")]
        model = penalise(Decoder(arch, held)).to(torch.float64)
    module = apply(model, world, mesh, compile_blocks=False, precision="fp64")
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    if mesh.size("pipeline") == 1:
        return model, Passes(module, "fp64", mesh.gradient_replicas), mesh
    pipeline = Pipeline(module, stages, mesh, torch.float64, reduce_each=False)
    return model, PipelinedPasses(pipeline, "fp64", mesh.gradient_replicas), mesh


def outcome(world: World, config: ParallelConfig, rows: int) -> dict[str, Any]:
    """Return the values of two steps, and the gradients of this rank's parameters."""
    model, step, mesh = made(world, config)
    found: dict[str, Any] = {}
    for number in range(2):  # another step with the same schedule
        model.zero_grad()
        batch = micro_batches(rows, mesh.index(*DATA), mesh.size(*DATA))
        losses = step.run(
            batch, loss_function(z_loss=1e-3, token_bytes=torch.ones(128)), ROWS * SEQ_LEN
        )
        found |= {f"{number} {k}": mesh.mean(v.clone()) for k, v in losses.named().items()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    evaluated = step.evaluate(batch[0], loss_function())
    found |= {f"evaluated {k}": mesh.sum(v.clone(), DATA) for k, v in evaluated.named().items()}
    with torch.no_grad():
        found["logits"] = step.module(torch.arange(SEQ_LEN)[None])
    return {name: value.tolist() for name, value in found.items()}


def assert_same(of_ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert set().union(*of_ranks) == expected.keys()
    for one in of_ranks:
        for name, value in one.items():
            torch.testing.assert_close(
                torch.tensor(value, dtype=torch.float64),
                torch.tensor(expected[name], dtype=torch.float64),
                rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_values_are_those_of_one_process(layout: str) -> None:
    config = LAYOUTS[layout]
    ranks = config.pipeline * config.shard * config.tensor
    # With 3 rows there are fewer micro-batches than four ranks need, and not an even number.
    rows = 3 if config.shard == 1 else 1
    assert_same(on_ranks(ranks, outcome, config, rows), shares_of_one(config.shard, rows))


@cache
def shares_of_one(shard: int, rows: int) -> dict[str, Any]:
    """The same without the pipeline and tensor parallelism; evaluations see the same rows."""
    config = ParallelConfig(replicate=1, shard=shard)
    found: dict[str, Any] = on_ranks(shard, outcome, config, rows)[0]
    return found


def tasks_of(world: World, config: ParallelConfig) -> tuple[Any, Any]:
    """Return scores of options and greedy answers, which all ranks of a pipeline give together."""
    model, step, mesh = made(world, config)
    module: Any = step.module
    whole = module.without_context() if isinstance(module, Pipeline) else model
    how: Any = {"multiple": mesh.size("tensor"), "collective": mesh.sharded}
    stages = mesh.size("pipeline")
    scorer = Scorer(whole, world, batch_tokens=40, precision="fp64", pipeline=stages, **how)
    questions = [[Option((1, 2, i), (3, 4)), Option((1, 2, i), (5,))] for i in range(7)]
    scores = scorer.score(questions)
    assert scores is not None
    answers = Generator(whole, world, batch_tokens=40, **how).generate([[1, 2], [7]], 4, [])
    return [
        [(round(o.log_likelihood, 9), o.greedy) for o in options] for options in scores
    ], answers


@pytest.mark.parametrize("layout", ["interleaved", "of tensors"])
def test_tasks_are_scored_and_answered_as_by_one_process(layout: str) -> None:
    config = LAYOUTS[layout]
    expected = tasks_of(start(Ranks(), "cpu"), ParallelConfig(replicate=1))
    ranks = config.pipeline * config.tensor
    assert on_ranks(ranks, tasks_of, config) == [expected] * ranks


def test_stages_in_the_middle_have_the_layers_that_remain() -> None:
    four = ParallelConfig(pipeline=4)
    assert [*map(len, four.stage_layers(10))] == [2, 3, 3, 2]
    assert [*map(len, four.stage_layers(9))] == [2, 3, 2, 2]
    assert [*map(len, four.stage_layers(8))] == [2, 2, 2, 2]
    config = ParallelConfig(pipeline=2, stages_per_rank=2, layers_per_stage=(1, 2, 2, 1))
    assert config.stage_layers(6) == [range(1), range(1, 3), range(3, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("keys", "arch", "why"),
    [
        ({"pipeline": 4, "stages_per_rank": 2}, {}, "8 stages, and model.n_layers=5"),
        ({"pipeline": 2, "layers_per_stage": (2, 2)}, {}, "sum is 4"),
        ({"pipeline": 2}, {"tie": True}, "tied"),
    ],
)
def test_layers_that_make_no_stages_are_refused(
    keys: dict[str, Any], arch: dict[str, Any], why: str
) -> None:
    tied = replace(architecture(), tie_embeddings=arch.get("tie", False))
    with pytest.raises(ConfigError, match=why):
        check_stages(ParallelConfig(**keys), tied)


def test_batches_that_make_too_few_or_uneven_micro_batches_are_refused() -> None:
    train = TrainConfig(seq_len=64, micro_batch=2, global_batch_tokens=12 * 64, steps=10)
    check_batches(train, Sizes(pipeline=6))
    with pytest.raises(ConfigError, match="at least 7"):
        check_batches(train, Sizes(pipeline=7))
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        check_batches(train, Sizes(pipeline=2, replicate=4))
