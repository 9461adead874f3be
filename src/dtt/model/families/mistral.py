"""Mistral 7B (Jiang et al., 2023, arXiv 2310.06825): Llama with a sliding window.

The first version has it; 0.2 and 0.3 are Llamas of another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import Family
from dtt.model.families.hf_config import SIZE, optional


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; what it leaves out is as in Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(arch, family="mistral", windows=(cfg.window,) * arch.n_layers)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """In the config.json of a MistralForCausalLM."""
    return llama.hf_facts(arch) | {"sliding_window": arch.windows[0]}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """From the config.json of a MistralForCausalLM; what it leaves out is as in transformers."""
    arch = llama.read_hf_config({"num_key_value_heads": 8, **config})
    window = config.get("sliding_window", 4096)
    return replace(arch, family="mistral", windows=(window,) * arch.n_layers)


MISTRAL = Family(
    name="mistral",
    hf_model_type="mistral",
    hf_class="MistralForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    # Not layer_types: with it, transformers makes another architecture of it, Ministral.
    hf_values=llama.HF_VALUES | {"sliding_window": optional(SIZE)},
    read_hf_config=read_hf_config,
    weights=llama.LLAMA.weights,
)
