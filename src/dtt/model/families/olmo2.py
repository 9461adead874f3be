"""OLMo 2 (OLMo Team, 2024, arXiv 2501.00656): Llama with post-norms and QK norm over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import DecoderFamily, same_name
from dtt.model.families.llama import LAYER

AXES: Mapping[str, Any] = {"family": "olmo2", "norm_placement": "post", "qk_norm": "all_heads"}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    return replace(llama.architecture(cfg, tokenizer_size, seq_len), **AXES)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of an Olmo2ForCausalLM's config.json."""
    # The default of pad_token_id is 1: transformers would not train that embedding.
    return llama.hf_facts(arch) | {"pad_token_id": None}


def read_hf_config(config: Mapping[str, Any], theta: float = 10_000.0) -> Architecture:
    """Return the architecture that an Olmo2ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers; `theta` is that of RoPE's base.
    """
    return replace(llama.read_hf_config({"rms_norm_eps": 1e-5, **config}, theta), **AXES)


WEIGHTS = (
    *(rule for rule in llama.WEIGHTS if not rule.dtt_names[0].endswith("attn_norm.weight")),
    *llama.QK_NORM,
    *same_name(f"{LAYER}.post_attention_layernorm", "layers.{i}.attn_post_norm", "weight"),
    *same_name(f"{LAYER}.post_feedforward_layernorm", "layers.{i}.mlp_post_norm", "weight"),
)

OLMO2 = DecoderFamily(
    name="olmo2",
    hf_model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=llama.HF_VALUES,
    read_hf_config=read_hf_config,
    weights=WEIGHTS,
)
