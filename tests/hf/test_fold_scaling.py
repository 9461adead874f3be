"""Exports of models with multipliers: stock classes of transformers compute the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from dtt.base.errors import DamagedError
from dtt.hf import publish, verify, write_folder
from dtt.hf.fold_scaling import fold
from dtt.hf.read import LoadedModel
from dtt.model.decoder import Decoder

MULTIPLIERS = {"embed_scale": 3.7, "attn_scale": 0.31, "residual_scale": 0.6, "logit_scale": 0.45}


@pytest.fixture
def multiplied(trained: LoadedModel) -> LoadedModel:
    """A model of each kind whose four multipliers are none that its class knows."""
    arch = dataclasses.replace(trained.arch, **MULTIPLIERS)
    state = {
        # Zeros and ones would hide a bias or an offset that is scaled wrongly.
        name: tensor + 0.3 if tensor.ndim == 1 else tensor
        for name, tensor in trained.state.items()
    }
    return dataclasses.replace(trained, arch=arch, state=state)


def logits(trained: LoadedModel, ids_1T: torch.Tensor) -> torch.Tensor:
    model = Decoder(trained.arch)
    model.load_state_dict(trained.state)
    with torch.inference_mode():
        return model.eval()(ids_1T)


def test_an_export_gives_transformers_the_logits_of_the_model_with_multipliers(
    multiplied: LoadedModel, tmp_path: Path
) -> None:
    origin = publish.ExportSource("job", 1, "c0ffee")
    write_folder.export(
        multiplied, origin, tmp_path / "run", dtype="fp32", max_shard_size="5GB", card=""
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    ids_1T = torch.randint(multiplied.arch.vocab_size, (1, 40))
    expected = logits(multiplied, ids_1T)
    with torch.inference_mode():
        got = theirs(ids_1T).logits
    assert (expected - got).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_each_multiplier_matters_and_is_checked(multiplied: LoadedModel, multiplier: str) -> None:
    plain = fold(multiplied)
    got = verify.random_logits(plain.tensors, plain.decoder)
    expected = verify.random_logits(multiplied.state, multiplied.arch)
    verify.differing_logits(None, expected, got, "the folded weights")
    standard = getattr(plain.arch, multiplier)
    forgotten = dataclasses.replace(multiplied.arch, **{multiplier: standard})
    wrong = verify.random_logits(multiplied.state, forgotten)
    with pytest.raises(DamagedError, match="folded weights differ"):
        verify.differing_logits(None, wrong, got, "the folded weights")


def test_weights_in_bf16_are_not_rounded_again(multiplied: LoadedModel) -> None:
    state = {name: tensor.bfloat16() for name, tensor in multiplied.state.items()}
    narrow = dataclasses.replace(multiplied, state=state)
    expected = verify.random_logits(narrow.state, narrow.arch)
    got = verify.random_logits(fold(narrow).state, fold(narrow).arch)
    assert (expected - got).abs().max() < 2e-5 * expected.abs().max()


def test_a_model_without_multipliers_keeps_its_tensors(trained: LoadedModel) -> None:
    folded = fold(trained)
    assert folded.arch == trained.arch
    assert all(folded.state[name] is tensor for name, tensor in trained.state.items())
