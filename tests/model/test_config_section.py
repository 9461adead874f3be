from __future__ import annotations

import json

import pytest

from dtt.config.load import resolve
from dtt.config.model import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
)
from dtt.config.shipped import shipped_configs
from dtt.model import families
from dtt.model.families.base import model_section

SMALL = {"dim": 32, "n_layers": 7, "n_heads": 4}
CONFIGS = [
    *(ModelConfig.model_validate({"family": f.name, **SMALL}) for f in families.every()),
    ModelConfig(family="gpt2", dim=32, n_heads=2, ffn_dim=96, tie_embeddings=False, norm_eps=1e-6),
    ModelConfig(dim=32, n_heads=4, n_kv_heads=1, head_dim=16, rope_theta=5e5),
    ModelConfig(dim=32, n_heads=4, tie_embeddings=True, rope_scaling=Llama3RopeScaling(factor=32)),
    ModelConfig(family="mistral", dim=32, n_heads=4, window=16),
    ModelConfig(
        family="gemma3", dim=32, n_heads=4, head_dim=16, query_pre_attn_scalar=24, window=16,
        window_pattern=3, logit_softcap=30.0, rope_theta=1e6,
        rope_scaling=LinearRopeScaling(factor=8.0),
    ),
]  # fmt: skip


def shipped() -> list[ModelConfig]:
    names = sorted(p.stem for p in (shipped_configs() / "models").glob("*.yaml"))
    return [resolve(f"models/{name}").config.model for name in names]


@pytest.mark.parametrize("cfg", [*CONFIGS, *shipped()], ids=lambda c: f"{c.family}-{c.dim}")
def test_the_section_makes_the_same_architecture(cfg: ModelConfig) -> None:
    family = families.get(cfg.family)
    arch = family.architecture(cfg, 300, 64)
    section = ModelConfig.model_validate_json(json.dumps(model_section(arch)))
    kept = {"init_std": cfg.init_std, "dropout": cfg.dropout, "max_seq_len": arch.max_seq_len}
    again = family.architecture(section.model_copy(update=kept), 300, 64)
    assert again == arch


def test_every_size_is_explicit() -> None:
    arch = families.get("llama").architecture(ModelConfig(), 300, 64)
    assert model_section(arch) == {
        "family": "llama", "dim": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4,
        "head_dim": 64, "ffn_dim": 704, "vocab_size": 320, "tie_embeddings": False,
        "norm_eps": 1e-5, "rope_theta": 10_000.0, "rope_scaling": {"type": "none"},
    }  # fmt: skip
