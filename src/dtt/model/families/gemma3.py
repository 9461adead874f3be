"""Gemma 3, text models only (Gemma Team, 2025, arXiv 2503.19786).

Most layers have a sliding window, with their own RoPE base. RMSNorm with 1 + weight is applied
before and after attention and MLP, and to queries and keys. The MLP is GeGLU, embeddings are
multiplied by sqrt(dim), and the head is tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import attention_windows, llama, rope_scaling
from dtt.model.families.attention_windows import FULL, LOCAL, every_nth
from dtt.model.families.base import DecoderFamily, same_name
from dtt.model.families.hf_config import (
    KINDS,
    NUMBER,
    SIZE,
    Values,
    only,
    optional,
    without_effect,
)
from dtt.model.families.llama import LAYER

WINDOW = 512
"""Sliding window of the 270M and 1B models, in tokens."""
PATTERN = 6
"""Interval of layers without a window."""
AXES: Mapping[str, Any] = {
    "family": "gemma3",
    "norm": "rmsnorm_plus_one",
    "qk_norm": "head",
    "norm_placement": "sandwich",
    "mlp": "geglu",
}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; every `window_pattern`-th layer has no window."""
    local, pattern = cfg.window or WINDOW, cfg.window_pattern or PATTERN
    return replace(
        llama.architecture(cfg, tokenizer_size, seq_len),
        **AXES,
        # Counted from 1, as in Gemma: with a pattern of 6, layers 6, 12, … are full.
        windows=tuple(local if layer % pattern else None for layer in range(1, cfg.n_layers + 1)),
        rope_local_theta=cfg.rope_local_theta,
        # null means the family's default, which is a tied head.
        tie_embeddings=cfg.tie_embeddings is not False,
        embed_scale=cfg.dim**0.5,
        attn_scale=(cfg.query_pre_attn_scalar or cfg.resolved_head_dim) ** -0.5,
        logit_softcap=cfg.logit_softcap,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Gemma3ForCausalLM's config.json.

    RoPE is written for old and new versions of transformers.
    """
    config = llama.hf_facts(arch)
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": arch.rope_local_theta,
        "rope_parameters": {
            FULL: config["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": arch.rope_local_theta},
        },
        "sliding_window": next((w for w in arch.windows if w is not None), WINDOW),
        "layer_types": attention_windows.to_hf(arch.windows),
        # transformers reads an integer and takes its inverse root. muP's multiplier may round to 0.
        "query_pre_attn_scalar": max(1, round(arch.attn_scale**-2)),
        "final_logit_softcapping": arch.logit_softcap,
        "pad_token_id": None,  # transformers would not train the embedding of a padding token
    }


HF_VALUES: Mapping[str, Values] = {
    **{key: values for key, values in llama.HF_VALUES.items() if key != "hidden_act"},
    "hidden_activation": only("gelu_pytorch_tanh"),
    "head_dim": SIZE,
    "num_key_value_heads": SIZE,
    "rope_local_base_freq": NUMBER,
    "sliding_window": optional(SIZE),
    "sliding_window_pattern": SIZE,
    "layer_types": optional(KINDS),
    "query_pre_attn_scalar": SIZE,
    "final_logit_softcapping": optional(NUMBER),
    "attn_logit_softcapping": only(None),
    "use_bidirectional_attention": only(False, None),
    **without_effect("_sliding_window_pattern"),  # transformers writes it, but never reads it
}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Gemma3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    full, local_theta = rope_scaling.by_layer_type(config, config.get("rope_local_base_freq"), 1e4)
    arch = llama.read_hf_config({"head_dim": 256, "num_key_value_heads": 4, **full}, theta=1e6)
    return replace(
        arch,
        **AXES,
        windows=attention_windows.from_hf(
            config,
            config.get("sliding_window", 4096),
            every_nth(arch.n_layers, config.get("sliding_window_pattern", PATTERN)),
        ),
        rope_local_theta=local_theta,
        tie_embeddings=config.get("tie_word_embeddings", True),
        embed_scale=arch.dim**0.5,
        attn_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


GEMMA3 = DecoderFamily(
    name="gemma3",
    hf_model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(
        *llama.WEIGHTS,
        *llama.QK_NORM,
        *same_name(f"{LAYER}.post_attention_layernorm", "layers.{i}.attn_post_norm", "weight"),
        *same_name(f"{LAYER}.pre_feedforward_layernorm", "layers.{i}.mlp_norm", "weight"),
        *same_name(f"{LAYER}.post_feedforward_layernorm", "layers.{i}.mlp_post_norm", "weight"),
    ),
)
