from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.config.adapter import LoraConfig
from dtt.config.model import ModelConfig
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.lora import attach
from dtt.train.warm_start import NewTokens, take_weights


def make(vocab_size: int = 64, seq_len: int = 16, seed: int = 0, **sizes: object) -> Decoder:
    cfg = ModelConfig.model_validate({"dim": 16, "n_layers": 2, "n_heads": 2, **sizes})
    model = Decoder(families.get(cfg.family).architecture(cfg, vocab_size, seq_len))
    initialize(model, seed)
    return model


def state(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


TIED: dict[str, Any] = {"tie_embeddings": True}
GPT2: dict[str, Any] = {"family": "gpt2"}


@pytest.mark.parametrize(
    ("theirs", "ours", "said", "taken"),
    [
        ({}, {}, "21 of 21 tensors, 0.01M parameters", {}),
        (TIED, {}, "head.weight: initialised from the embedding, to which the head is tied there",
         {"head.weight": "embed.weight"}),
        ({}, TIED, "head.weight: none here, [64, 16] there", {}),
        ({"vocab_size": 128}, {}, "embed.weight: 64 rows copied, 64 here, 128 there", {}),
        (GPT2 | {"seq_len": 32}, GPT2, "pos_embed.weight: 16 rows copied, 16 here, 32 there", {}),
    ],
    ids=["equal", "tied there", "tied here", "more tokens", "more positions"],
)  # fmt: skip
def test_what_fits_is_taken_and_what_does_not_is_named(
    theirs: dict[str, Any], ours: dict[str, Any], said: str, taken: dict[str, str]
) -> None:
    """`taken`: tensors that are not those of the same name."""
    source, model = make(seed=1, **theirs), make(**ours)
    report = take_weights(model, state(source), "there")
    assert said in report
    assert report.startswith("weights from there: ")
    assert (len(report.splitlines()) == 1) == (theirs == ours)
    for name, tensor in state(model).items():
        expected = state(source)[taken.get(name, name)]
        assert torch.equal(tensor, expected[: len(tensor)]), name
    if "tie_embeddings" not in ours and "vocab_size" not in theirs:
        ids = torch.arange(16)[None]
        assert torch.equal(model(ids), source(ids))


def test_tokens_that_are_new_hardly_change_the_probabilities_of_the_others() -> None:
    theirs, ours = make(64, seed=1), make(128)
    with torch.no_grad():  # all logits far below zero, as those of GPT-2 are
        theirs.norm.weight.fill_(5.0)
        direction = torch.ones(16) / 16
        theirs.get_parameter("embed.weight").add_(direction * 8)
        theirs.get_parameter("head.weight").sub_(direction * 8)
    ids = torch.arange(10)[None]
    report = take_weights(ours, state(theirs), "there")
    line = "head.weight: 64 rows copied, 128 here, 64 there; the others get their mean"
    assert line in report
    before = theirs(ids).log_softmax(-1)
    assert theirs(ids).max() < -10
    after = ours(ids).log_softmax(-1)[..., :64]
    assert (before - after).abs().max() < 0.75  # twice as many tokens as likely as the mean: ln 2
    assert ours.get_parameter("head.weight")[64:].std(0).max() == 0


def test_another_width_fits_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"norm.weight: \[16\] here, \[32\] there"):
        take_weights(make(), state(make(dim=32)), "there")


@pytest.mark.parametrize("tied", [False, True])
def test_untrained_tokens_and_new_ones_start_from_the_mean_of_the_trained_ones(tied: bool) -> None:
    theirs, ours = make(64, seed=1, tie_embeddings=tied), make(70, tie_embeddings=tied)
    before = state(theirs)
    report = take_weights(
        ours, before, "there", NewTokens({}, {7: "<|im_start|>", 63: "<|im_end|>"})
    )
    names = ["embed.weight"] if tied else ["embed.weight", "head.weight"]
    trained = [i for i in range(64) if i not in (7, 63)]
    for name in names:
        line = f"  {name}: the mean of the other rows for untrained tokens: "
        assert f"{line}<|im_start|> (7), <|im_end|> (63)" in report
        rows, mean = state(ours)[name], before[name][trained].mean(0)
        assert torch.equal(rows[trained], before[name][trained])
        for i in (7, 63, *range(64, 70)):
            torch.testing.assert_close(rows[i], mean)


def test_untrained_tokens_of_a_model_of_the_same_size_start_from_the_mean() -> None:
    theirs, ours = make(64, seed=1), make(64)
    report = take_weights(ours, state(theirs), "there", NewTokens({}, {63: "<|im_end|>"}))
    assert "63 rows" not in report
    mean = state(theirs)["head.weight"][:63].mean(0)
    torch.testing.assert_close(state(ours)["head.weight"][63], mean)


def test_a_token_in_an_unused_row_starts_from_the_mean_of_the_used_ones() -> None:
    theirs, ours = make(64, seed=1), make(64)
    new = NewTokens({60: "<call>"}, unused=frozenset(range(60, 64)))
    report = take_weights(ours, state(theirs), "there", new)
    assert "untrained tokens: <call> (60)" in report
    before, after = state(theirs)["head.weight"], state(ours)["head.weight"]
    torch.testing.assert_close(after[60], before[:60].mean(0))
    assert torch.equal(after[61:], before[61:])


def test_an_adapter_cannot_add_a_token_in_an_unused_row() -> None:
    ours = make(64)
    attach(ours, LoraConfig(), torch.float32)
    new = NewTokens({60: "<call>"}, unused=frozenset(range(60, 64)))
    with pytest.raises(ConfigError, match=r"cannot add tokens(.|\n)*<call> \(60\)"):
        take_weights(ours, state(make(64, seed=1)), "there", new)
