from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.config.model import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelConfig,
    YarnRopeScaling,
)
from dtt.hf.read import Trained
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize

VARIANTS = {
    "gpt2": ModelConfig(family="gpt2", dim=32, n_layers=2, n_heads=4),
    "gpt2-untied": ModelConfig(
        family="gpt2", dim=32, n_layers=2, n_heads=4, ffn_dim=96, tie_embeddings=False
    ),
    "llama": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=4),
    "llama-tied": ModelConfig(
        family="llama", dim=32, n_layers=2, n_heads=4, tie_embeddings=True, rope_theta=5e5
    ),
    "llama-grouped": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=4, n_kv_heads=2),
    "llama-wide-heads": ModelConfig(
        family="llama", dim=32, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=16
    ),
    "llama-scaled": ModelConfig(
        family="llama",
        dim=32,
        n_layers=2,
        n_heads=4,
        rope_scaling=Llama3RopeScaling(original_max_seq_len=16, factor=4.0),
    ),
    "mistral": ModelConfig(family="mistral", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, window=9),
    "mistral-no-window-tied": ModelConfig(
        family="mistral", dim=32, n_layers=2, n_heads=4, tie_embeddings=True
    ),
    "qwen2": ModelConfig(
        family="qwen2",
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        window=9,
        max_window_layers=1,
        rope_scaling=YarnRopeScaling(factor=8.0, original_max_seq_len=16, attention_factor=1.3),
    ),
    "qwen3": ModelConfig(family="qwen3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16),
    "qwen3-tied": ModelConfig(family="qwen3", dim=32, n_layers=2, n_heads=4, tie_embeddings=True),
    "phi3": ModelConfig(family="phi3", dim=32, n_layers=2, n_heads=4, window=9),
    "phi3-grouped-tied": ModelConfig(
        family="phi3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, tie_embeddings=True
    ),
    "phi3-longrope": ModelConfig(
        family="phi3",
        dim=32,
        n_layers=2,
        n_heads=4,
        partial_rotary_factor=0.5,
        rope_scaling=LongRopeScaling(
            short_factor=(1.0, 1.5),
            long_factor=(2.0, 8.0),
            original_max_seq_len=32,
            attention_factor=1.2,
        ),
    ),
    "smollm3": ModelConfig(
        family="smollm3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, no_rope_layer_interval=2
    ),
    "olmo2": ModelConfig(family="olmo2", dim=32, n_layers=2, n_heads=4, n_kv_heads=2),
    "olmo3": ModelConfig(
        family="olmo3",
        dim=32,
        n_layers=2,
        n_heads=4,
        window=5,
        window_pattern=2,
        rope_theta=5e5,
        rope_scaling=YarnRopeScaling(original_max_seq_len=8),
    ),
    "gemma3": ModelConfig(
        family="gemma3",
        dim=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        window=5,
        window_pattern=3,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(factor=4.0),
        query_pre_attn_scalar=12,
        logit_softcap=3.0,
    ),
    "gemma3-untied": ModelConfig(
        family="gemma3", dim=32, n_layers=2, n_heads=4, window=9, tie_embeddings=False
    ),
}


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 300 entries; <|endoftext|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["def main():\n    return None  # a word and another word"] * 9, trainer
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=VARIANTS)
def trained(request: pytest.FixtureRequest, tokenizer_json: Path) -> Trained:
    """A tiny model of each kind, with weights that are not tiny."""
    return make(VARIANTS[request.param], tokenizer_json)


@pytest.fixture
def llama(tokenizer_json: Path) -> Trained:
    """One of them, for what does not depend on the kind."""
    return make(VARIANTS["llama"], tokenizer_json)


def make(cfg: ModelConfig, tokenizer_json: Path) -> Trained:
    arch = families.get(cfg.family).architecture(cfg, 300, 64)
    model = Decoder(arch)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return Trained(arch, model.state_dict(), tokenizer_json, 0, (0,))
