"""Scores of options and greedy answers: those of a plain forward pass, on any number of ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.ranks import on_ranks

from dtt.base.ranks import Ranks
from dtt.config.model import LinearRopeScaling, ModelConfig
from dtt.config.parallel import Sizes
from dtt.evaluate.tasks.scorer import (
    Generator,
    Option,
    OptionBatch,
    OptionScore,
    Scorer,
    tree_batches,
)
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import make_mesh
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.generate import generate
from dtt.model.init import initialize
from dtt.parallel.apply import apply
from dtt.parallel.sharded_model import whole_copy

SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4}
FAMILIES = {
    "gpt2": ModelConfig(family="gpt2", **SIZES),
    "llama": ModelConfig(family="llama", n_kv_heads=2, **SIZES),
    "mistral": ModelConfig(family="mistral", window=7, **SIZES),
    "qwen3": ModelConfig(family="qwen3", n_kv_heads=2, head_dim=16, **SIZES),
    "phi3": ModelConfig(family="phi3", n_kv_heads=2, window=7, **SIZES),
    "gemma3": ModelConfig(
        family="gemma3",
        n_kv_heads=2,
        window=5,
        window_pattern=2,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(),
        logit_softcap=3.0,
        **SIZES,
    ),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe", n_kv_heads=2, head_dim=16, n_experts=4, experts_per_token=2, **SIZES
    ),
}
Scores = list[list[OptionScore]]


def make(family: str, dropout: float = 0.0) -> Decoder:
    """With weights in which nothing is the identity."""
    cfg = FAMILIES[family].model_copy(update={"dropout": dropout})
    model = Decoder(families.get(cfg.family).architecture(cfg, 128, 96))
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def questions() -> list[list[Option]]:
    """Multiple choice with and without a common few-shot prompt, and what is less regular."""
    generator = torch.Generator().manual_seed(2)

    def ids(least: int, most: int) -> tuple[int, ...]:
        count = int(torch.randint(least, most + 1, (), generator=generator))
        return tuple(torch.randint(128, (count,), generator=generator).tolist())

    shots = ids(40, 40)
    asked = []
    for prompt in [()] * 6 + [shots] * 6:
        context = prompt + ids(1, 20)
        asked.append([Option(context, ids(1, 6)) for _ in range(4)])
    return [
        *asked,
        [Option(ids(3, 9), (5, 6)), Option(ids(3, 9), (5, 6))],  # contexts of their own
        [Option(shots, (5, 6)), Option(shots, (5,)), Option((*shots, 5), (6,))],
        [Option(shots, (5, 6)), Option(shots, (5, 6))],
        [Option((3,), ids(60, 60))],
        [Option(ids(90, 90), ids(7, 7))],
    ]


@torch.no_grad()
def plain(model: Decoder, option: Option) -> OptionScore:
    ids = torch.tensor([*option.context, *option.continuation])
    nats_TV = model(ids[None, :-1])[0].double().log_softmax(dim=-1)[len(option.context) - 1 :]
    targets = ids[len(option.context) :]
    total = nats_TV.gather(1, targets[:, None]).sum().item()
    return OptionScore(total, bool((nats_TV.argmax(dim=1) == targets).all()))


def with_greedy_options(model: Decoder) -> list[list[Option]]:
    """The questions, with one more option for the first ones: what the model would say."""
    asked = questions()
    for i, options in enumerate(asked[:3]):
        context = options[0].context
        said = tuple(generate(model, context, max_new_tokens=3, temperature=0))
        asked[i] = [*options, Option(context, said)]
    return asked


def assert_equal(got: Scores | None, expected: Scores) -> None:
    """Log-likelihoods differ by at most 1e-5 per nat; every other field is the same."""
    assert got is not None
    for some, others in zip(got, expected, strict=True):
        assert [one.greedy for one in some] == [other.greedy for other in others]
        nats, wanted = ([one.log_likelihood for one in all_] for all_ in (some, others))
        assert nats == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def score(model: Decoder, world: World, asked: Any, tokens: int = 100, **how: Any) -> Scores | None:
    return Scorer(model, world, batch_tokens=tokens, **how).score(asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_plain_forward_passes_at_any_batch_size(family: str) -> None:
    model, world = make(family).eval(), start(Ranks(), "cpu")
    asked = with_greedy_options(model)
    expected = [[plain(model, option) for option in options] for options in asked]
    assert sum(one.greedy for options in expected for one in options) >= 3
    for tokens in (1, 100, 10_000):
        assert_equal(score(model, world, asked, tokens), expected)


def size(batch: OptionBatch) -> int:
    assert batch.trees is not None
    return len(batch.trees.tokens)


def test_what_options_share_is_computed_once() -> None:
    context = (1, 2, 3, 4)
    alone = [Option(context, (5, 6, 7)), Option(context, (8, 9)), Option(context, (8,))]
    (batch,) = tree_batches([alone], 1000)
    assert size(batch) == 4 + 2 + 1 + 0
    assert [size(batch) for batch in tree_batches([alone] * 5, 14)] == [14, 14, 7]
    # A question that exceeds a batch is divided by options.
    assert [size(batch) for batch in tree_batches([alone], 6)] == [4 + 2, 4 + 1]


def on_replicas(world: World, family: str) -> Scores | None:
    torch.set_num_threads(1)
    return score(make(family), world, questions())


def test_scores_do_not_depend_on_the_number_of_ranks_to_the_last_bit() -> None:
    (alone,) = on_ranks(1, on_replicas, "llama")
    for ranks in (2, 3):
        assert on_ranks(ranks, on_replicas, "llama") == [alone] * ranks


def on_shards(
    world: World, family: str, sizes: Sizes
) -> tuple[Scores | None, list[list[list[int]] | None]]:
    """The layouts of a run: what all ranks return for a model whose weights are sharded.

    The answers are those of a copy of all weights, and those for which no memory is left.
    """
    torch.set_num_threads(1)
    model = make(family)
    layout = make_mesh(sizes, world, None if model.arch.mixture is None else 2)
    apply(model, world, layout, compile_blocks=False)
    how: Any = {"multiple": sizes.tensor, "collective": True}
    asked = questions()
    generator, answers = Generator(model, world, batch_tokens=100, **how), []
    for free in (1 << 40, 0 if world.first else 1 << 40):
        with patch("dtt.base.host_memory.free", lambda free=free: free):
            copied = whole_copy(model, world)
            answers.append(generator.generate(PROMPTS, 4, []))
        if len(answers) == 2:  # rank 0 has no memory for a copy
            assert copied is None
            continue
        assert copied is not None
        for name, weight in make(family).state_dict().items():
            assert torch.equal(copied.state_dict()[name], weight)
    scores = score(model, world, asked, **how)
    assert model.training
    return scores, answers


PROMPTS = [[1, 2, 3], [7], list(range(94)), [5, 5]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma3", Sizes(shard=3)),
        ("gpt2", Sizes(tensor=2)),
        ("llama", Sizes(context=2)),
        ("qwen3", Sizes(shard=2, tensor=2)),
        ("qwen3_moe", Sizes(shard=2)),
    ],
)
def test_sharded_models_score_and_answer_alike(family: str, sizes: Sizes) -> None:
    model = make(family).eval()
    expected = [[plain(model, option) for option in options] for options in questions()]
    said = [list(generate(model, ids, max_new_tokens=4, temperature=0)) for ids in PROMPTS]
    ranks = sizes.replicate * sizes.shard * sizes.context * sizes.tensor
    for scores, answers in on_ranks(ranks, on_shards, family, sizes):
        assert_equal(scores, expected)
        assert answers == [said, said]


def test_scoring_changes_no_bit_of_the_training_that_follows() -> None:
    world = start(Ranks(), "cpu")
    losses = []
    for scoring in (False, True):
        model = make("gpt2", dropout=0.1).train()
        torch.manual_seed(3)
        if scoring:
            assert score(model, world, questions()) == score(model.eval(), world, questions())
            assert not model.training
            model.train()
            score(model, world, questions())
            assert model.training
        tokens = torch.arange(64).view(2, 32)
        loss = model(tokens, tokens).loss
        loss.backward()
        losses.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_requested_stop_ends_scoring_and_answers() -> None:
    model, world = make("gpt2"), start(Ranks(), "cpu")
    calls = iter([False, True])
    scorer = Scorer(model, world, batch_tokens=100)
    assert scorer.score(questions(), lambda: next(calls)) is None
    assert next(calls, None) is None
    answers = Generator(model, world, batch_tokens=100)
    assert answers.generate(PROMPTS, 4, [], lambda: True) is None


def answers_on(world: World, tokens: int, until: list[int]) -> list[list[int]] | None:
    torch.set_num_threads(1)
    return Generator(make("llama"), world, batch_tokens=tokens).generate(PROMPTS, 6, until)


def test_answers_are_greedy_and_end_before_a_stop_token_or_with_the_context() -> None:
    model = make("llama").eval()
    expected = [list(generate(model, ids, max_new_tokens=6, temperature=0)) for ids in PROMPTS]
    assert [len(ids) for ids in expected] == [6, 6, 2, 6]
    world = start(Ranks(), "cpu")
    until = expected[0][3]
    cut = [ids[: ids.index(until)] if until in ids else ids for ids in expected]
    for tokens in (1, 30, 1000):
        assert answers_on(world, tokens, []) == expected
        assert answers_on(world, tokens, [until]) == cut
    for ranks in (2, 3):
        assert on_ranks(ranks, answers_on, 30, [until]) == [cut] * ranks
