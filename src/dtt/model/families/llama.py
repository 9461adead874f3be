"""Llama 2, 3 and 3.1 (Touvron et al., 2023; Dubey et al., 2024): RoPE, RMSNorm, SwiGLU, GQA.

Derived families reuse these functions and tables and override what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtt.config.init_std import DEFAULT_STD, InitialStd, parse_std
from dtt.config.model import ModelConfig, NoRopeScaling
from dtt.model.architecture import Architecture, fit_context, fit_vocabulary, round_up
from dtt.model.families import rope_scaling
from dtt.model.families.base import DecoderFamily, same_name
from dtt.model.families.hf_config import (
    NUMBER,
    OBJECT,
    SHARE,
    SIZE,
    Values,
    only,
    optional,
    without_effect,
)

AXES: Mapping[str, Any] = {
    "family": "llama",
    "norm": "rmsnorm",
    "qk_norm": "none",
    "norm_placement": "pre",
    "position": "rope",
    "rope_local_theta": None,
    "partial_rotary_factor": 1.0,
    "mlp": "swiglu",
    "bias": "none",
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; the MLP is 8/3 times as wide as the model, in multiples of 64."""
    return Architecture(
        **AXES,
        vocab_size=fit_vocabulary(cfg, tokenizer_size),
        max_seq_len=fit_context(cfg, seq_len),
        dim=cfg.dim,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads or cfg.n_heads,
        head_dim=cfg.resolved_head_dim,
        # Three matrices of 8/3 have as many weights as two of 4, those of an MLP without a gate
        # (Shazeer, 2020). The multiple of 64 suits matrix kernels and tensor parallelism.
        ffn_dim=cfg.ffn_dim or round_up(8 * cfg.dim // 3, 64),
        norm_eps=cfg.norm_eps,
        rope_theta=cfg.rope_theta,
        rope_scaling=cfg.rope_scaling,
        rope_layers=(True,) * cfg.n_layers,
        windows=(None,) * cfg.n_layers,
        tie_embeddings=cfg.tie_embeddings is True,
        attn_scale=cfg.resolved_head_dim**-0.5,
        init_std=parse_std(cfg.init_std),
        dropout=cfg.dropout,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a LlamaForCausalLM's config.json.

    RoPE is written for old and new versions of transformers.
    """
    scaling = rope_scaling.to_hf(arch.rope_scaling)
    return {
        "max_position_embeddings": arch.max_seq_len,
        "hidden_size": arch.dim,
        "num_hidden_layers": arch.n_layers,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.ffn_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None if arch.rope_scaling == NoRopeScaling() else scaling,
        # transformers 5 reads `rope_parameters` and older versions the two keys above it; the file
        # serves both.
        "rope_parameters": scaling | {"rope_theta": arch.rope_theta},
        "attention_dropout": 0.0,
    }


HF_VALUES: dict[str, Values] = {
    "hidden_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": optional(SIZE),
    "head_dim": optional(SIZE),
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "hidden_act": only("silu"),
    "rms_norm_eps": NUMBER,
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "rope_theta": NUMBER,
    "rope_scaling": optional(OBJECT),
    "rope_parameters": optional(OBJECT),
    "rope_interleaved": only(False, None),
    "partial_rotary_factor": only(1.0, None),
    "attention_dropout": optional(SHARE),
    **without_effect("pretraining_tp is_llama_config"),
}


def read_hf_config(
    config: Mapping[str, Any],
    theta: float = 10_000.0,
    rope_types: Sequence[str] = rope_scaling.USUAL,
) -> Architecture:
    """Return the architecture that a LlamaForCausalLM's config.json describes.

    `theta` is the base of RoPE if the file has none, and `rope_types` are the supported scalings.
    """
    rope_theta, scaling = rope_scaling.from_hf(config, theta, rope_types)
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // n_heads
    return Architecture(
        **AXES,
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        ffn_dim=config["intermediate_size"],
        # the default of transformers
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        rope_layers=(True,) * config["num_hidden_layers"],
        windows=(None,) * config["num_hidden_layers"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        attn_scale=head_dim**-0.5,
        init_std=InitialStd.uniform(config.get("initializer_range", DEFAULT_STD)),
        dropout=0.0,
    )


LAYER = "model.layers.{i}"
WEIGHTS = (
    *same_name("model.embed_tokens", "embed", "weight"),
    *same_name(f"{LAYER}.input_layernorm", "layers.{i}.attn_norm", "weight"),
    *same_name(f"{LAYER}.self_attn.q_proj", "layers.{i}.attn.q", "weight"),
    *same_name(f"{LAYER}.self_attn.k_proj", "layers.{i}.attn.k", "weight"),
    *same_name(f"{LAYER}.self_attn.v_proj", "layers.{i}.attn.v", "weight"),
    *same_name(f"{LAYER}.self_attn.o_proj", "layers.{i}.attn.o", "weight"),
    *same_name(f"{LAYER}.mlp.gate_proj", "layers.{i}.mlp.gate", "weight"),
    *same_name(f"{LAYER}.mlp.up_proj", "layers.{i}.mlp.up", "weight"),
    *same_name(f"{LAYER}.mlp.down_proj", "layers.{i}.mlp.down", "weight"),
    *same_name("model.norm", "norm", "weight"),
    *same_name("lm_head", "head", "weight"),
)
MLP_NORM = same_name(f"{LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm", "weight")
QK_NORM = (
    *same_name(f"{LAYER}.self_attn.q_norm", "layers.{i}.attn.q_norm", "weight"),
    *same_name(f"{LAYER}.self_attn.k_norm", "layers.{i}.attn.k_norm", "weight"),
)

LLAMA = DecoderFamily(
    name="llama",
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(*WEIGHTS, *MLP_NORM),
)
