"""Mistral 7B (Jiang et al., 2023, arXiv 2310.06825): Llama with a sliding window.

Version 0.1 has the window; 0.2 and 0.3 are Llama models under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import SIZE, optional


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(arch, family="mistral", windows=(cfg.window,) * arch.n_layers)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a MistralForCausalLM's config.json."""
    return llama.hf_facts(arch) | {"sliding_window": arch.windows[0]}


def read_hf_config(config: Mapping[str, Any], theta: float = 10_000.0) -> Architecture:
    """Return the architecture that a MistralForCausalLM's config.json describes.

    Missing keys have the defaults of transformers; `theta` is that of the base of RoPE.
    """
    arch = llama.read_hf_config({"num_key_value_heads": 8, **config}, theta)
    # A missing key means 4096 to transformers, and an explicit null means no window.
    window = config.get("sliding_window", 4096)
    return replace(arch, family="mistral", windows=(window,) * arch.n_layers)


MISTRAL = DecoderFamily(
    name="mistral",
    hf_model_type="mistral",
    hf_class="MistralForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    # layer_types is not supported: with it, transformers builds Ministral instead.
    hf_values=llama.HF_VALUES | {"sliding_window": optional(SIZE)},
    read_hf_config=read_hf_config,
    weights=llama.LLAMA.weights,
)
