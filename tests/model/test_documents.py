"""Documents in one sequence: each is computed as if it stood alone."""

from __future__ import annotations

import torch
import transformers
from support.stand_in import stored
from support.tiny_architectures import DOCUMENTS, LENGTHS, alone, make

from dtt.config.model import LongRopeScaling, ModelConfig
from dtt.hf.weights import from_hf
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.token_context import document_positions


def test_positions_restart_with_each_document() -> None:
    expected = [[i for length in row for i in range(length)] for row in LENGTHS]
    assert document_positions(DOCUMENTS).tolist() == expected


@torch.no_grad()
def test_logits_are_those_of_each_document_alone(arch: Architecture) -> None:
    model, tokens = make(arch)
    packed = model(tokens, doc_ids_BT=DOCUMENTS)
    torch.testing.assert_close(packed, alone(model, tokens), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed, model(tokens), atol=1e-2)


@torch.no_grad()
def test_longrope_rotates_each_document_by_its_own_length() -> None:
    scaling = LongRopeScaling(
        short_factor=(1.0,) * 4, long_factor=(5.0,) * 4, original_max_seq_len=8
    )
    cfg = ModelConfig(family="phi3", dim=32, n_layers=2, n_heads=4, rope_scaling=scaling)
    model, tokens = make(families.get("phi3").architecture(cfg, 100, 24))
    packed = model(tokens, doc_ids_BT=DOCUMENTS)
    torch.testing.assert_close(packed, alone(model, tokens), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_logits_are_those_of_transformers_for_each_document_alone(arch: Architecture) -> None:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**families.get(arch.family).to_hf_config(arch, 0))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    model, tokens = make(arch)
    model.load_state_dict(from_hf(stored(theirs), arch))
    packed = model.eval()(tokens, doc_ids_BT=DOCUMENTS)
    expected = alone(lambda part: theirs(part).logits, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=2e-5)


def test_gradients_are_the_sum_of_those_of_each_document_alone(arch: Architecture) -> None:
    model, tokens = make(arch)
    targets = tokens.roll(-1, 1)
    model(tokens, targets, doc_ids_BT=DOCUMENTS).loss.backward()
    packed = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for row, wanted, lengths in zip(tokens, targets, LENGTHS, strict=True):
        for part, target in zip(row.split(lengths), wanted.split(lengths), strict=True):
            model(part[None], target[None]).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # not for the correction of a router
            torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_document_is_what_a_plain_sequence_is(arch: Architecture) -> None:
    model, tokens = make(arch)
    masked = model(tokens, doc_ids_BT=torch.zeros_like(tokens))
    torch.testing.assert_close(masked, model(tokens), rtol=1e-5, atol=1e-5)
