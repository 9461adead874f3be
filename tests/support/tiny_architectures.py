"""Tiny architectures of every kind, and packed documents for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtt.config.model import LinearRopeScaling, LongRopeScaling, ModelConfig, YarnRopeScaling
from dtt.mesh.dtypes import wide
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.layers import Block

VARIANTS = {
    "gpt2": ModelConfig(family="gpt2", dim=32, n_layers=2, n_heads=4),
    "llama": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=4),
    "llama-grouped-tied": ModelConfig(
        family="llama", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, tie_embeddings=True
    ),
    "mistral": ModelConfig(family="mistral", dim=32, n_layers=2, n_heads=4, window=7),
    "qwen2": ModelConfig(
        family="qwen2", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, window=7, max_window_layers=1
    ),
    "qwen3": ModelConfig(family="qwen3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16),
    "phi3": ModelConfig(
        family="phi3",
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        window=7,
        partial_rotary_factor=0.5,
        rope_scaling=LongRopeScaling(
            short_factor=(1.0, 1.5),
            long_factor=(2.0, 8.0),
            original_max_seq_len=24,
            attention_factor=1.1,
        ),
    ),
    "smollm3": ModelConfig(
        family="smollm3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, no_rope_layer_interval=2
    ),
    "olmo3": ModelConfig(
        family="olmo3",
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        window=5,
        window_pattern=2,
        rope_theta=5e5,
        rope_scaling=YarnRopeScaling(original_max_seq_len=8),
    ),
    "gemma3": ModelConfig(
        family="gemma3",
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=1,
        window=5,
        window_pattern=2,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(),
        logit_softcap=3.0,
    ),
}

LENGTHS = [[5, 1, 11, 7], [24], [1, 1, 22]]
DOCUMENTS = torch.tensor(
    [[n for n, length in enumerate(r) for _ in range(length)] for r in LENGTHS]
)


def tiny_architecture(variant: str) -> Architecture:
    """Return one with 2 layers, a vocabulary of 128, and a context of 24."""
    cfg = VARIANTS[variant]
    return families.get(cfg.family).architecture(cfg, 100, 24)


class Penalised(Block):
    """A block with an auxiliary loss: the squares of what it returns."""

    def forward(self, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x_BTD, _ = super().forward(*inputs)
        return x_BTD, {"squares": 0.01 * wide(x_BTD).square().sum()}


def penalise(model: Decoder) -> Decoder:
    for block in model.layers:
        block.__class__ = Penalised
    return model


def make(arch: Architecture) -> tuple[Decoder, Tensor]:
    model = Decoder(arch)
    initialize(model, seed=1)
    tokens = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(0))
    return model, tokens


def alone(model: Any, tokens: Tensor) -> Tensor:
    """The logits of each document by itself, put together again."""
    parts = [row.split(lengths) for row, lengths in zip(tokens, LENGTHS, strict=True)]
    return torch.stack([torch.cat([model(part[None])[0] for part in row]) for row in parts])
