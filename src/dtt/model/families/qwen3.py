"""Qwen3 (Yang et al., 2025, arXiv 2505.09388), dense: Llama with normed queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import Family, refuse_unless


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; what it leaves out is as in Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(arch, family="qwen3", qk_norm=True)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """In the config.json of a Qwen3ForCausalLM."""
    return llama.hf_facts(arch) | {"use_sliding_window": False}


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """From the config.json of a Qwen3ForCausalLM; what it leaves out is as in transformers."""
    refuse_unless(config, "use_sliding_window", False)
    for kind in config.get("layer_types") or ():
        refuse_unless({**config, "layer_types": kind}, "layer_types", "full_attention")
    arch = llama.from_hf_config({"head_dim": 128, "num_key_value_heads": 32, **config})
    return replace(arch, family="qwen3", qk_norm=True)


QWEN3 = Family(
    name="qwen3",
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    from_hf_config=from_hf_config,
    weights=(*llama.LLAMA.weights, *llama.QK_NORM),
)
