from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from dtt.errors import DamagedError
from dtt.export.read import Trained
from dtt.export.weights import from_hf, to_hf
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

TOKENS = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(0))


def hf_model(arch: Architecture) -> Any:
    """transformers' class for the architecture, with its own random weights."""
    config = families.get(arch.family).to_hf_config(arch, 0)
    torch.manual_seed(5)
    built: Any = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(built).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ours(trained: Trained, state: dict[str, torch.Tensor] | None = None) -> Decoder:
    model = Decoder(trained.arch)
    model.load_state_dict(state or dict(trained.state))
    return model.eval()


@torch.no_grad()
def test_their_weights_in_our_decoder_give_their_logits(trained: Trained) -> None:
    theirs = hf_model(trained.arch)
    arch = families.get(trained.arch.family).from_hf_config(theirs.config.to_dict())
    assert arch == trained.arch
    model = ours(trained, from_hf(theirs.state_dict(), arch))
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_our_weights_in_their_class_give_our_logits(trained: Trained) -> None:
    theirs = hf_model(trained.arch)
    missing, unexpected = theirs.load_state_dict(to_hf(trained.state, trained.arch), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if trained.arch.tie_embeddings else [])
    theirs.tie_weights()
    logits = ours(trained)(TOKENS)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-4, atol=2e-5)


def test_gradients_are_theirs_too(trained: Trained) -> None:
    theirs = hf_model(trained.arch)
    model = ours(trained, from_hf(theirs.state_dict(), trained.arch))
    targets = TOKENS.roll(-1, 1)
    targets[:, -1] = -100
    model(TOKENS, targets).backward()
    (theirs(TOKENS, labels=TOKENS).loss * (targets != -100).sum()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected = from_hf(grads, trained.arch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-3)


def test_there_and_back_changes_no_bit(trained: Trained) -> None:
    state = from_hf(to_hf(trained.state, trained.arch), trained.arch)
    assert state.keys() == dict(trained.state).keys()
    assert all(torch.equal(state[name], value) for name, value in trained.state.items())
    tensors = to_hf(state, trained.arch)
    again = to_hf(from_hf(tensors, trained.arch), trained.arch)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_missing_and_unknown_tensors_are_named(trained: Trained) -> None:
    state = dict(trained.state)
    state["layers.9.attn.q.weight"] = state.pop("layers.0.attn.q.weight")
    with pytest.raises(DamagedError, match=r"1 missing .*layers\.0.*1 unknown .*layers\.9"):
        to_hf(state, trained.arch)
