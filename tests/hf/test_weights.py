from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from support.stand_in import stored

from dtt.base.errors import DamagedError
from dtt.config.model import ModelConfig
from dtt.hf.read import LoadedModel
from dtt.hf.weights import from_hf, to_hf
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
        corrections = (b for name, b in model.named_buffers() if "correction" in name)
        for tensor in (*model.parameters(), *corrections):
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to fp32 rounding: 1e-5 of the largest number."""
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def ours(trained: LoadedModel, state: dict[str, torch.Tensor] | None = None) -> Decoder:
    model = Decoder(trained.arch)
    model.load_state_dict(state or dict(trained.state))
    return model.eval()


@torch.no_grad()
def test_hugging_face_weights_in_a_decoder_give_the_logits_of_transformers(
    trained: LoadedModel,
) -> None:
    theirs = hf_model(trained.arch)
    arch = families.get(trained.arch.family).from_hf_config(theirs.config.to_dict())
    assert arch == trained.arch
    model = ours(trained, from_hf(stored(theirs), arch))
    assert_equal(model(TOKENS), theirs(TOKENS).logits)


def test_weights_of_the_base_class_are_accepted(trained: LoadedModel) -> None:
    with_prefix = to_hf(trained.state, trained.arch)
    base = {n if n == "lm_head.weight" else n.partition(".")[2]: t for n, t in with_prefix.items()}
    got = from_hf(base, trained.arch)
    assert got.keys() == trained.state.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in trained.state.items())


def test_gradients_equal_those_of_transformers(trained: LoadedModel) -> None:
    theirs = hf_model(trained.arch)
    model = ours(trained, from_hf(stored(theirs), trained.arch))
    targets = TOKENS.roll(-1, 1)
    targets[:, -1] = -100
    model(TOKENS, targets).loss.backward()
    (theirs(TOKENS, labels=TOKENS).loss * (targets != -100).sum()).backward()
    # The correction of a router has none.
    grads = {n: p if p.grad is None else p.grad for n, p in model.named_parameters()}
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    expected = stored(theirs)
    for name, grad in to_hf(grads, trained.arch).items():
        assert_equal(grad, expected[name])


@torch.no_grad()
def test_bf16_weights_give_the_bf16_logits_of_transformers_up_to_rounding(
    trained: LoadedModel,
) -> None:
    theirs = hf_model(trained.arch)
    model = ours(trained, from_hf(stored(theirs), trained.arch))
    exact = theirs(TOKENS).logits
    got, expected = model.bfloat16()(TOKENS), theirs.bfloat16()(TOKENS).logits
    assert got.dtype == expected.dtype == torch.bfloat16
    error, allowed = (got - exact).abs().mean(), (expected - exact).abs().mean()
    # A score that is rounded may choose another expert, here or there; and dtt weights before the
    # last product of an expert, transformers after it.
    assert error <= (1.1 if trained.arch.mixture is None else 2.0) * allowed


@torch.no_grad()
def test_gemmas_embeddings_are_scaled_by_the_root_rounded_to_bf16() -> None:
    cfg = ModelConfig(family="gemma3", dim=32, n_layers=1)
    arch = families.get("gemma3").architecture(cfg, 300, 64)
    theirs = hf_model(arch).bfloat16()
    model = Decoder(arch)
    model.load_state_dict(from_hf(stored(theirs), arch))
    seen: list[torch.Tensor] = []
    model.bfloat16().layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(TOKENS)
    assert torch.equal(seen[0], theirs.get_input_embeddings()(TOKENS))
    assert not torch.equal(seen[0], model.embed(TOKENS) * arch.embed_scale)


def test_a_tensor_of_another_shape_is_named(trained: LoadedModel) -> None:
    tensors = dict(to_hf(trained.state, trained.arch))
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 1)
    tensors[name] = torch.zeros(7)
    with pytest.raises(DamagedError, match=rf"{re.escape(name)} is \[7\], not \["):
        from_hf(tensors, trained.arch)


def test_missing_and_unknown_tensors_are_named(trained: LoadedModel) -> None:
    state = dict(trained.state)
    state["layers.9.attn.q.weight"] = state.pop("layers.0.attn.q.weight")
    with pytest.raises(DamagedError, match=r"1 missing .*layers\.0.*1 unknown .*layers\.9"):
        to_hf(state, trained.arch)
