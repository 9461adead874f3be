"""Greedy answers to held-out conversations: which of them stop by themselves."""

from __future__ import annotations

import logging

import pytest
import torch
from support.ranks import on_ranks

from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.evaluate.answers import AnswerEvaluator
from dtt.mesh.dist import World, start
from dtt.model import families
from dtt.model.decoder import Decoder

FOLLOWERS = {2: 4, 4: 8, 3: 5, 5: 3, 6: 9}
"""The token that the model of these tests says after each: after 2 and 6 it stops, with 8 or 9."""
PROMPTS = [[1, 2], [3], [7, 7, 6], [2, 5]]


def model() -> Decoder:
    cfg = ModelConfig(dim=16, n_layers=1, n_heads=2)
    decoder = Decoder(families.get(cfg.family).architecture(cfg, 300, 16))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.fill_(1.0 if name == "norm.weight" else 0.0)
        for axis, (token, follower) in enumerate(FOLLOWERS.items()):
            decoder.get_parameter("embed.weight")[token, axis] = 1.0
            decoder.get_parameter("head.weight")[follower, axis] = 1.0
    return decoder


def stop_rate(world: World, tokens: int, batch: int, prompts: list[list[int]]) -> float | None:
    return AnswerEvaluator(prompts, (8, 9), tokens, batch, world).stop_rate(model(), lambda: False)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_rate_is_the_share_of_answers_that_end_with_any_stop_token(batch: int) -> None:
    world = start(Ranks(), "cpu")
    assert stop_rate(world, 8, batch, PROMPTS) == 0.5
    assert stop_rate(world, 2, batch, PROMPTS) == 0.5
    assert stop_rate(world, 1, batch, PROMPTS) == 0.25  # only the one that says nothing
    assert stop_rate(world, 100, batch, [[7] * 15 + [2]]) == 0.0  # the context is full


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_prompts_and_agree_on_the_rate(ranks: int) -> None:
    for count in (1, 4):
        rates = on_ranks(ranks, stop_rate, 8, 2, PROMPTS[:count])
        assert set(rates) == {1.0 if count == 1 else 0.5}


def test_a_requested_stop_ends_the_answers() -> None:
    answers = AnswerEvaluator(PROMPTS, (8, 9), 8, 2, start(Ranks(), "cpu"))
    assert answers.stop_rate(model(), lambda: True) is None


def test_a_model_that_has_diverged_stops_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    decoder = model()
    torch.nn.init.constant_(decoder.get_parameter("norm.weight"), torch.nan)
    answers = AnswerEvaluator(PROMPTS, (8, 9), 8, 2, start(Ranks(), "cpu"))
    with caplog.at_level(logging.WARNING, logger="dtt"):
        assert answers.stop_rate(decoder, lambda: False) == 0.0
    assert "no answers: the model's logits are not finite" in caplog.text
