"""Llama up to 3.0 (Touvron et al., 2023; Dubey et al., 2024): RoPE, RMSNorm, SwiGLU, GQA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, fit_context, fit_vocabulary, round_up
from dtt.model.families.base import Family, refuse_unless, same_name


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; the MLP is 8/3 times as wide as the model, in multiples of 64."""
    return Architecture(
        family="llama",
        vocab_size=fit_vocabulary(cfg, tokenizer_size),
        max_seq_len=fit_context(cfg, seq_len),
        dim=cfg.dim,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads or cfg.n_heads,
        head_dim=cfg.resolved_head_dim,
        ffn_dim=cfg.ffn_dim or round_up(8 * cfg.dim // 3, 64),
        norm="rmsnorm",
        norm_eps=cfg.norm_eps,
        position="rope",
        rope_theta=cfg.rope_theta,
        mlp="swiglu",
        bias=False,
        tie_embeddings=cfg.tie_embeddings is True,
        init_std=cfg.init_std,
        dropout=cfg.dropout,
    )


def to_hf_config(arch: Architecture, end_of_document: int) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM; the base of RoPE stands where old and new readers look."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": arch.vocab_size,
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
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": arch.init_std,
        "tie_word_embeddings": arch.tie_embeddings,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
    }


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """From the config.json of a LlamaForCausalLM without RoPE scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "mlp_bias", False)
    refuse_unless({"model_type": "llama", **rope}, "rope_type", "default")
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        family="llama",
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or dim // n_heads,
        ffn_dim=config["intermediate_size"],
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        position="rope",
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
        mlp="swiglu",
        bias=False,
        tie_embeddings=config.get("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        dropout=0.0,
    )


_LAYER = "model.layers.{i}"

LLAMA = Family(
    name="llama",
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    architecture=architecture,
    to_hf_config=to_hf_config,
    from_hf_config=from_hf_config,
    weights=(
        *same_name("model.embed_tokens", "embed", "weight"),
        *same_name(f"{_LAYER}.input_layernorm", "layers.{i}.attn_norm", "weight"),
        *same_name(f"{_LAYER}.self_attn.q_proj", "layers.{i}.attn.q", "weight"),
        *same_name(f"{_LAYER}.self_attn.k_proj", "layers.{i}.attn.k", "weight"),
        *same_name(f"{_LAYER}.self_attn.v_proj", "layers.{i}.attn.v", "weight"),
        *same_name(f"{_LAYER}.self_attn.o_proj", "layers.{i}.attn.o", "weight"),
        *same_name(f"{_LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm", "weight"),
        *same_name(f"{_LAYER}.mlp.gate_proj", "layers.{i}.mlp.gate", "weight"),
        *same_name(f"{_LAYER}.mlp.up_proj", "layers.{i}.mlp.up", "weight"),
        *same_name(f"{_LAYER}.mlp.down_proj", "layers.{i}.mlp.down", "weight"),
        *same_name("model.norm", "norm", "weight"),
        *same_name("lm_head", "head", "weight"),
    ),
)
