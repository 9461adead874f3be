from __future__ import annotations

import math

import torch

from dtt.config.model import ModelConfig
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import initialize


def state(arch: Architecture, seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(arch)
    initialize(model, seed)
    return model.state_dict()


def test_weights_have_the_published_spread() -> None:
    cfg = ModelConfig(family="gpt2", dim=256, n_layers=8, n_heads=4)
    arch = families.get("gpt2").architecture(cfg, 1024, 64)
    for name, value in state(arch, 0).items():
        if value.ndim == 1:
            assert torch.all(value == (0.0 if name.endswith("bias") else 1.0)), name
        else:
            writes_residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(16) if writes_residual else 0.02
            assert abs(value.std().item() / std - 1) < 0.03, name
            assert abs(value.mean().item()) < 0.05 * std, name


def test_a_seed_and_a_name_decide_a_parameter_alone(arch: Architecture) -> None:
    first, again, other = state(arch, 7), state(arch, 7), state(arch, 8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.ndim == 1 or not torch.equal(value, other[name])
    torch.manual_seed(99)
    deeper = Decoder(arch)
    deeper.layers.append(Decoder(arch).layers[0])
    initialize(deeper, 7)
    assert all(torch.equal(deeper.state_dict()[name], value) for name, value in first.items())
