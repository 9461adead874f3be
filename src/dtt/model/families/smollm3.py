"""SmolLM3 (Hugging Face, 2025): Llama without a rotary embedding in every fourth layer (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import (
    FLAGS,
    KINDS,
    SIZE,
    only,
    optional,
    unsupported,
    without_effect,
)

INTERVAL = 4
"""Interval of layers without a rotary embedding."""


def _rope_layers(n_layers: int, interval: int) -> tuple[bool, ...]:
    return tuple(layer % interval != 0 for layer in range(1, n_layers + 1))


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; the head is tied by default."""
    return replace(
        llama.architecture(cfg, tokenizer_size, seq_len),
        family="smollm3",
        rope_layers=_rope_layers(cfg.n_layers, cfg.no_rope_layer_interval),
        tie_embeddings=cfg.tie_embeddings is not False,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a SmolLM3ForCausalLM's config.json."""
    return llama.hf_facts(arch) | {
        "no_rope_layers": list(map(int, arch.rope_layers)),  # 1: with a rotary embedding
        "no_rope_layer_interval": (*arch.rope_layers, False).index(False) + 1,
        "use_sliding_window": False,
        "pad_token_id": None,  # the default, 128004, may lie outside the vocabulary
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a SmolLM3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    arch = llama.read_hf_config({"num_key_value_heads": 4, **config}, theta=2e6)
    full = ["full_attention"] * arch.n_layers
    if (config.get("layer_types") or full) != full:
        raise unsupported(
            config,
            f"config.json has layer_types: {config['layer_types']}; "
            f"supported: 'full_attention' for each of the {arch.n_layers} layers",
        )
    default = _rope_layers(arch.n_layers, config.get("no_rope_layer_interval", INTERVAL))
    listed = config.get("no_rope_layers")
    # transformers reads an empty list as one without a layer, and fails.
    rope_layers = default if listed is None else tuple(map(bool, listed))
    if len(rope_layers) != arch.n_layers:
        raise unsupported(
            config,
            f"config.json has no_rope_layers: {listed}; supported: one number for each of the "
            f"{arch.n_layers} layers",
        )
    return replace(
        arch,
        family="smollm3",
        rope_layers=rope_layers,
        tie_embeddings=config.get("tie_word_embeddings", True),
    )


SMOLLM3 = DecoderFamily(
    name="smollm3",
    hf_model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=llama.HF_VALUES
    | {
        "no_rope_layers": optional(FLAGS),
        "no_rope_layer_interval": SIZE,
        "use_sliding_window": only(False),
        "layer_types": optional(KINDS),
    }
    | without_effect("sliding_window max_window_layers"),
    read_hf_config=read_hf_config,
    weights=llama.LLAMA.weights,
)
