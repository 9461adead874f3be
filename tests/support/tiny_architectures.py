"""Tiny architectures of every kind, and packed documents for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtt.config.model import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelConfig,
    YarnRopeScaling,
)
from dtt.mesh.dtypes import wide
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.experts import Mixed
from dtt.model.init import initialize
from dtt.model.layers import Block, held_layers

SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4}
VARIANTS = {
    "gpt2": ModelConfig(family="gpt2", **SIZES),
    "gpt2-untied": ModelConfig(family="gpt2", **SIZES, ffn_dim=96, tie_embeddings=False),
    "llama": ModelConfig(family="llama", **SIZES),
    "llama-grouped-tied": ModelConfig(
        family="llama", **SIZES, n_kv_heads=2, tie_embeddings=True, rope_theta=5e5,
        rope_scaling=Llama3RopeScaling(original_max_seq_len=16, factor=4.0),
    ),
    "mistral": ModelConfig(family="mistral", **SIZES, n_kv_heads=2, window=7),
    "qwen2": ModelConfig(
        family="qwen2", **SIZES, n_kv_heads=2, window=7, max_window_layers=1,
        rope_scaling=YarnRopeScaling(factor=8.0, original_max_seq_len=16, attention_factor=1.3),
    ),
    "qwen3": ModelConfig(family="qwen3", **SIZES, n_kv_heads=2, head_dim=16),
    "phi3": ModelConfig(
        family="phi3", **SIZES, n_kv_heads=2, window=7, partial_rotary_factor=0.5,
        rope_scaling=LongRopeScaling(
            short_factor=(1.0, 1.5), long_factor=(2.0, 8.0), original_max_seq_len=24,
            attention_factor=1.1,
        ),
    ),
    "smollm3": ModelConfig(family="smollm3", **SIZES, n_kv_heads=2, no_rope_layer_interval=2),
    "olmo2": ModelConfig(family="olmo2", **SIZES, n_kv_heads=2),
    "olmo3": ModelConfig(
        family="olmo3", **SIZES, window=5, window_pattern=2, rope_theta=5e5,
        rope_scaling=YarnRopeScaling(original_max_seq_len=8),
    ),
    "gemma3": ModelConfig(
        family="gemma3", **(SIZES | {"n_layers": 3}), n_kv_heads=2, head_dim=16, window=5,
        window_pattern=3, rope_theta=1e6, rope_scaling=LinearRopeScaling(factor=4.0),
        query_pre_attn_scalar=12, logit_softcap=3.0,
    ),
    "mixtral": ModelConfig(family="mixtral", **SIZES, n_kv_heads=2, window=7, n_experts=4),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe", **(SIZES | {"n_layers": 3}), n_kv_heads=2, head_dim=16, n_experts=5,
        experts_per_token=3, expert_ffn_dim=24, n_dense_layers=1,
    ),
    "olmoe": ModelConfig(family="olmoe", **SIZES, n_experts=6, experts_per_token=1),
    "dots1": ModelConfig(
        family="dots1", **SIZES, n_kv_heads=2, n_experts=8, experts_per_token=3, expert_ffn_dim=40,
        n_dense_layers=1, n_shared_experts=2, n_expert_groups=4, expert_groups_per_token=2,
        routed_scaling=2.5,
    ),
    "gemma3-untied": ModelConfig(family="gemma3", **SIZES, window=9, tie_embeddings=False),
}  # fmt: skip

LENGTHS = [[5, 1, 11, 7], [24], [1, 1, 22]]
DOCUMENTS = torch.tensor(
    [[n for n, length in enumerate(r) for _ in range(length)] for r in LENGTHS]
)


def tiny_architecture(variant: str, vocab_size: int = 100, max_seq_len: int = 24) -> Architecture:
    """Return one with 2 or 3 layers."""
    cfg = VARIANTS[variant]
    return families.get(cfg.family).architecture(cfg, vocab_size, max_seq_len)


class Penalised(Block):
    """A block with an auxiliary loss: the squares of what it returns."""

    def forward(self, *inputs: Any) -> Mixed:
        mixed = super().forward(*inputs)
        return mixed._replace(aux={"squares": 0.01 * wide(mixed.out).square().sum()})


def penalise(model: Decoder) -> Decoder:
    for block in held_layers(model).values():
        block.__class__ = Penalised
    return model


def decoder(cfg: ModelConfig, vocab_size: int, seq_len: int, seed: int = 0) -> Decoder:
    model = Decoder(families.get(cfg.family).architecture(cfg, vocab_size, seq_len))
    initialize(model, seed)
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
