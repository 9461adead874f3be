"""GPT-2 (Radford et al., 2019): learned positions, pre-LayerNorm, tanh-GELU, biases, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.init_std import DEFAULT_STD, InitialStd
from dtt.config.model import ModelConfig, NoRopeScaling
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import DecoderFamily, WeightRule, same_name
from dtt.model.families.hf_config import NUMBER, SHARE, SIZE, Values, only, optional, without_effect

AXES: Mapping[str, Any] = {
    **llama.AXES,
    "family": "gpt2",
    "norm": "layernorm",
    "position": "learned",
    "rope_theta": ModelConfig().rope_theta,
    "rope_scaling": NoRopeScaling(),
    "mlp": "gelu",
    "bias": "all",
}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; the MLP is four times as wide as the model."""
    return replace(
        llama.architecture(cfg, tokenizer_size, seq_len),
        **AXES,
        n_kv_heads=cfg.n_heads,
        ffn_dim=cfg.ffn_dim or 4 * cfg.dim,
        rope_layers=(False,) * cfg.n_layers,
        tie_embeddings=cfg.tie_embeddings is not False,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a GPT2LMHeadModel's config.json."""
    return {
        "n_positions": arch.max_seq_len,
        "n_embd": arch.dim,
        "n_layer": arch.n_layers,
        "n_head": arch.n_heads,
        "n_inner": arch.ffn_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": arch.norm_eps,
        "resid_pdrop": arch.dropout,
        "embd_pdrop": arch.dropout,
        # dtt applies no dropout to attention probabilities, so the export must not either.
        "attn_pdrop": 0.0,
    }


HF_VALUES: Mapping[str, Values] = {
    "n_positions": SIZE,
    "n_embd": SIZE,
    "n_layer": SIZE,
    "n_head": SIZE,
    "n_inner": optional(SIZE),
    "activation_function": only("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": NUMBER,
    "resid_pdrop": SHARE,
    "embd_pdrop": SHARE,
    "attn_pdrop": SHARE,
    "scale_attn_weights": only(True),
    "scale_attn_by_inverse_layer_idx": only(False),
    **without_effect(
        "n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation "
        "summary_proj_to_labels summary_first_dropout"
    ),
}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a GPT2LMHeadModel's config.json describes."""
    dim, n_heads = config["n_embd"], config["n_head"]
    return Architecture(
        **AXES,
        vocab_size=config["vocab_size"],
        max_seq_len=config["n_positions"],
        dim=dim,
        n_layers=config["n_layer"],
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=dim // n_heads,
        ffn_dim=config.get("n_inner") or 4 * dim,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        rope_layers=(False,) * config["n_layer"],
        windows=(None,) * config["n_layer"],
        attn_scale=(dim // n_heads) ** -0.5,
        tie_embeddings=config.get("tie_word_embeddings", True),
        init_std=InitialStd.uniform(config.get("initializer_range", DEFAULT_STD)),
        # The default of transformers, which a file may rely on by omission.
        dropout=config.get("resid_pdrop", 0.1),
    )


_LAYER = "transformer.h.{i}"
_QKV = tuple(f"layers.{{i}}.attn.{part}" for part in "qkv")


def _linear(hf_name: str, *dtt_names: str) -> tuple[WeightRule, ...]:
    """Return the rules of a linear layer; GPT-2's Conv1D stores its weight as [in, out]."""
    return (
        WeightRule(
            f"{hf_name}.weight", tuple(f"{name}.weight" for name in dtt_names), transpose=True
        ),
        WeightRule(f"{hf_name}.bias", tuple(f"{name}.bias" for name in dtt_names)),
    )


GPT2 = DecoderFamily(
    name="gpt2",
    hf_model_type="gpt2",
    hf_class="GPT2LMHeadModel",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(
        *same_name("transformer.wte", "embed", "weight"),
        *same_name("transformer.wpe", "pos_embed", "weight"),
        *same_name(f"{_LAYER}.ln_1", "layers.{i}.attn_norm", "weight", "bias"),
        *_linear(f"{_LAYER}.attn.c_attn", *_QKV),
        *_linear(f"{_LAYER}.attn.c_proj", "layers.{i}.attn.o"),
        *same_name(f"{_LAYER}.ln_2", "layers.{i}.mlp_norm", "weight", "bias"),
        *_linear(f"{_LAYER}.mlp.c_fc", "layers.{i}.mlp.up"),
        *_linear(f"{_LAYER}.mlp.c_proj", "layers.{i}.mlp.down"),
        *same_name("transformer.ln_f", "norm", "weight", "bias"),
        *same_name("lm_head", "head", "weight"),
    ),
)
