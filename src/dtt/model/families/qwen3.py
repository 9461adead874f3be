"""Qwen3 (Yang et al., 2025, arXiv 2505.09388), dense: Llama with QK norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import Family
from dtt.model.families.hf_config import KINDS, SIZE, only, optional, unsupported, without_effect


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(arch, family="qwen3", qk_norm=True)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Qwen3ForCausalLM's config.json."""
    return llama.hf_facts(arch) | {"use_sliding_window": False}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Qwen3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    # Files may omit these: the defaults of transformers are not derived from other sizes.
    arch = llama.read_hf_config({"head_dim": 128, "num_key_value_heads": 32, **config})
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * arch.n_layers:
        raise unsupported(
            config,
            f"config.json has layer_types: {kinds}; "
            f"supported: 'full_attention' for each of the {arch.n_layers} layers",
        )
    return replace(arch, family="qwen3", qk_norm=True)


QWEN3 = Family(
    name="qwen3",
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=llama.HF_VALUES
    | {"head_dim": SIZE, "use_sliding_window": only(False), "layer_types": optional(KINDS)}
    | without_effect("sliding_window max_window_layers"),
    read_hf_config=read_hf_config,
    weights=(*llama.LLAMA.weights, *llama.QK_NORM),
)
