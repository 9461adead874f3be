"""The family `transformers` in the place of one that dtt has computes what that one computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_architectures import tiny_architecture
from torch import Tensor

from dtt.hf import library_folder
from dtt.hf.weights import to_hf
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.output import Output
from dtt.verify.folder import initialized

EXACT = {"llama": 1e-10, "qwen3": 1e-10, "mixtral": 1e-6}
"""Relative differences in fp64; the library computes the weights of experts in fp32."""


def normed(norm: Any, x_BTD: Tensor) -> Tensor:
    """Do in fp64 what RMSNorm of the library does in fp32, whatever dtype its input has."""
    return torch.nn.functional.rms_norm(
        x_BTD, norm.weight.shape, norm.weight, norm.variance_epsilon
    )


@pytest.mark.parametrize("variant", EXACT)
def test_a_forced_family_has_the_losses_and_gradients_of_dtts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    arch, exact = tiny_architecture(variant), EXACT[variant]
    own = Decoder(arch).double()
    initialize(own, seed=3)
    config = families.get(arch.family).to_hf_config(arch, 0)
    forced = initialized(library_folder.architecture(config, tmp_path))
    for module in forced.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", normed)
    forced.double().load_state_dict(
        in_library(tmp_path / "weights", own.state_dict(), arch, config)
    )
    tokens = torch.randint(arch.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(16) // 9).expand(2, 16)
    losses = []
    for model in (own, forced):
        output = model(tokens[:, :-1], tokens[:, 1:], doc_ids_BT=ids)
        assert isinstance(output, Output)
        output.loss.backward()
        losses.append(float(output.loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=exact)
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    expected = in_library(tmp_path / "gradients", gradients, arch, config)
    for name, parameter in forced.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=exact, atol=exact)


def in_library(
    folder: Path, state: dict[str, Any], arch: Any, config: dict[str, Any]
) -> dict[str, Tensor]:
    """Return tensors of dtt's own family by the names of the library, which reads them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    tensors = {name: tensor.contiguous() for name, tensor in to_hf(state, arch).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found: dict[str, Tensor] = library_folder.loaded(folder, torch.float64)[0].state_dict()
    return found
