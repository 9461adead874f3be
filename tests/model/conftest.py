from __future__ import annotations

import pytest

from dtt.config.model import ModelConfig
from dtt.model import families
from dtt.model.architecture import Architecture

VARIANTS = {
    "gpt2": ModelConfig(family="gpt2", dim=32, n_layers=2, n_heads=4),
    "llama": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=4),
    "llama-grouped-tied": ModelConfig(
        family="llama", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, tie_embeddings=True
    ),
}


@pytest.fixture(params=VARIANTS)
def arch(request: pytest.FixtureRequest) -> Architecture:
    """A tiny architecture of each kind: 2 layers, vocabulary 128, context 24."""
    cfg = VARIANTS[request.param]
    return families.get(cfg.family).architecture(cfg, 100, 24)
