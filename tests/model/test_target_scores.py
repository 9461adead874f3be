"""Scores of targets: log-softmax and arg max of the logits, at scored positions only."""

from __future__ import annotations

import pytest
import torch
from support.largest_tensor import LargestTensor
from support.ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtt.mesh.dist import World
from dtt.model.loss import VocabularyPart
from dtt.model.target_scores import target_scores

N, C, D, V = 50, 3, 16, 96
IGNORED = -100


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and candidates: most are ignored, and some are the most likely."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    targets = torch.randint(V, (N, C), generator=g)
    targets[::2, 1] = (hidden @ weight.T).argmax(dim=1)[::2]
    targets[torch.rand(N, C, generator=g) < 0.3] = IGNORED
    targets[::3] = IGNORED
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nats = logits.log_softmax(dim=1).gather(1, targets.clamp(min=0))
    scores = torch.stack([nats, logits.argmax(dim=1, keepdim=True) == targets], dim=-1)
    return scores.masked_fill((targets == IGNORED)[..., None], 0.0).float()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_scores_are_log_softmax_and_arg_max(chunk: int | None, softcap: float | None) -> None:
    hidden, weight, targets = problem()
    expected = plain(hidden, weight, targets, softcap)
    assert 5 < expected[..., 1].sum() < 30
    scores = target_scores(hidden, weight, targets, softcap, chunk=chunk)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_under_autocast_only_the_logits_are_bf16() -> None:
    hidden, weight, targets = problem()
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float().log_softmax(dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        nats = target_scores(hidden, weight, targets)[..., 0]
    scored = targets != IGNORED
    expected = rounded.gather(1, targets.clamp(min=0))[scored]
    torch.testing.assert_close(nats[scored], expected, rtol=1e-5, atol=1e-5)


def test_memory_is_that_of_the_logits_of_one_chunk_of_scored_tokens() -> None:
    hidden, weight, targets = problem()
    targets[5:] = IGNORED
    with LargestTensor(ignored=(D, V)) as largest:
        target_scores(hidden, weight, targets, chunk=2)
    assert largest.elements <= N * D  # two rows of logits would be fewer, all of them more
    targets[:] = IGNORED
    with LargestTensor(ignored=(D, V)) as largest:
        assert not target_scores(hidden, weight, targets).any()
    assert largest.elements <= N * C * 2


def test_scores_of_a_model_that_has_diverged_are_nan() -> None:
    hidden, weight, targets = problem()
    scores = target_scores(hidden * torch.nan, weight, targets)
    assert scores[..., 0].isnan().equal(targets != IGNORED)


def tie() -> tuple[Tensor, Tensor, Tensor]:
    """The problem with two most likely tokens, of the first and the last shard."""
    hidden, weight, targets = problem()
    weight[V - 1] = weight[0]
    targets[1, 0], targets[1, 1] = 0, V - 1
    hidden[1] = weight[0]
    return hidden, weight, targets


def on_a_shard(world: World, softcap: float | None) -> Tensor:
    hidden, weight, targets = tie()
    rows = V // world.size
    part = VocabularyPart(init_device_mesh("cpu", (world.size,)), V)
    own = weight[part.first : part.first + rows]
    return target_scores(hidden, own, targets, softcap, part, chunk=7)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_vocabulary_shards_give_the_same_scores_and_the_lowest_id_wins(
    softcap: float | None,
) -> None:
    hidden, weight, targets = tie()
    expected = plain(hidden, weight, targets, softcap)
    assert expected[1, :2, 1].tolist() == [1.0, 0.0]
    for scores in on_ranks(2, on_a_shard, softcap):
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
