"""Families without experts: Llama, and what others do differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtt.config.model import LongRopeScaling, ModelConfig, NoRopeScaling
from dtt.model.architecture import Architecture
from dtt.model.families import rope_scaling
from dtt.model.families.base import DecoderFamily, WeightRule, renamed, rope_layers
from dtt.model.families.hf_config import (
    ANYTHING,
    COUNT,
    FLAG,
    FLAGS,
    FRACTION,
    KINDS,
    NUMBER,
    OBJECT,
    SHARE,
    SIZE,
    Key,
    only,
    optional,
    unsupported,
    without_effect,
)

LAYER = "model.layers.{i}"
QK_NORM = renamed({f"{LAYER}.self_attn.{x}_norm": f"layers.{{i}}.attn.{x}_norm" for x in "qk"})
BODY = renamed(
    {
        "model.embed_tokens": "embed",
        f"{LAYER}.input_layernorm": "layers.{i}.attn_norm",
        f"{LAYER}.self_attn.q_proj": "layers.{i}.attn.q",
        f"{LAYER}.self_attn.k_proj": "layers.{i}.attn.k",
        f"{LAYER}.self_attn.v_proj": "layers.{i}.attn.v",
        f"{LAYER}.self_attn.o_proj": "layers.{i}.attn.o",
        f"{LAYER}.mlp.gate_proj": "layers.{i}.mlp.gate",
        f"{LAYER}.mlp.up_proj": "layers.{i}.mlp.up",
        f"{LAYER}.mlp.down_proj": "layers.{i}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    }
)
MLP_NORM = renamed({f"{LAYER}.post_attention_layernorm": "layers.{i}.mlp_norm"})
POST_NORMS = {
    f"{LAYER}.post_attention_layernorm": "layers.{i}.attn_post_norm",
    f"{LAYER}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
}
UNFUSED = tuple(f".{x}_proj.weight" for x in ("q", "k", "v", "gate", "up"))
"""Ends of the names of tensors that Phi-3 joins."""
# Of a padding token, transformers would not train the embedding.
NO_PADDING = Key(ANYTHING, writes=None)

# Llama 2, 3 and 3.1 (Touvron et al., 2023; Dubey et al., 2024): RoPE, RMSNorm, SwiGLU, GQA.
LLAMA = DecoderFamily(
    name="llama",
    hf_class="LlamaForCausalLM",
    keys={
        "max_position_embeddings": Key(SIZE, "max_seq_len"),
        "hidden_size": Key(SIZE, "dim"),
        "num_hidden_layers": Key(SIZE, "n_layers"),
        "num_attention_heads": Key(SIZE, "n_heads"),
        "num_key_value_heads": Key(optional(SIZE), "n_kv_heads", None),
        "head_dim": Key(optional(SIZE), "head_dim", None),
        "intermediate_size": Key(SIZE, "ffn_dim"),
        "hidden_act": Key(only("silu"), writes="silu"),
        "rms_norm_eps": Key(NUMBER, "norm_eps", 1e-6),
        "rope_theta": Key(NUMBER),
        "rope_scaling": Key(optional(OBJECT)),
        "rope_parameters": Key(optional(OBJECT)),
        "attention_dropout": Key(optional(SHARE), writes=0.0),
        "attention_bias": Key(only(False)),
        "mlp_bias": Key(only(False)),
        "rope_interleaved": Key(only(False, None)),
        "partial_rotary_factor": Key(only(1.0, None)),
        "pretraining_tp": Key(ANYTHING),
        "is_llama_config": Key(ANYTHING),
    },
    weights=(*BODY, *MLP_NORM),
)

# Mistral 7B (Jiang et al., 2023, arXiv 2310.06825): Llama with a sliding window. Version 0.1 has
# the window; 0.2 and 0.3 are Llama models under another name.
MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_class="MistralForCausalLM",
    window_keys=("sliding_window",),
    keys={
        # layer_types is not supported: with it, transformers builds Ministral instead.
        **LLAMA.keys,
        "num_key_value_heads": Key(optional(SIZE), "n_kv_heads", 8),
        # A missing key means 4096 to transformers, and an explicit null means no window.
        "sliding_window": Key(optional(SIZE), default=4096),
    },
)

# Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv 2407.10671, 2412.15115), dense: Llama with biases of
# queries, keys and values. With `use_sliding_window`, the layers from `max_window_layers` on have a
# sliding window; the released models do without.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    axes={"bias": "qkv"},
    window_keys=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    keys={
        **LLAMA.keys,
        "num_key_value_heads": Key(optional(SIZE), "n_kv_heads", 32),
        # transformers ignores it and always has these biases.
        "attention_bias": Key(only(True)),
        "use_sliding_window": Key(FLAG, default=False),
        "sliding_window": Key(optional(SIZE), default=4096),
        "max_window_layers": Key(COUNT, default=28),
        "layer_types": Key(optional(KINDS)),
    },
    weights=(
        *LLAMA.weights,
        *renamed({f"{LAYER}.self_attn.{x}_proj": f"layers.{{i}}.attn.{x}" for x in "qkv"}, "bias"),
    ),
)

# Qwen3 (Yang et al., 2025, arXiv 2505.09388), dense: Qwen2 with QK norm instead of biases.
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    axes={"qk_norm": "head"},
    keys={
        **QWEN2.keys,
        "attention_bias": Key(only(False)),
        # Files may omit it: the default of transformers is not derived from other sizes.
        "head_dim": Key(SIZE, "head_dim", 128),
    },
    weights=(*LLAMA.weights, *QK_NORM),
)


def _read_smollm3(values: dict[str, Any]) -> dict[str, Any]:
    n_layers, listed = values["num_hidden_layers"], values["no_rope_layers"]
    # transformers reads an empty list as one without a layer, and fails.
    if listed is None:
        rotated = rope_layers(n_layers, values["no_rope_layer_interval"])
    else:
        rotated = tuple(map(bool, listed))
    if len(rotated) != n_layers:
        raise unsupported(
            values,
            f"config.json has no_rope_layers: {listed}; supported: one number for each of the "
            f"{n_layers} layers",
        )
    return {**values, "no_rope_layers": rotated}


def _write_smollm3(arch: Architecture) -> dict[str, Any]:
    return {
        "no_rope_layers": list(map(int, arch.rope_layers)),  # 1: with a rotary embedding
        "no_rope_layer_interval": (*arch.rope_layers, False).index(False) + 1,
    }


# SmolLM3 (Hugging Face, 2025): Llama without a rotary embedding in every fourth layer (NoPE).
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_class="SmolLM3ForCausalLM",
    window_keys=("use_sliding_window",),
    keys={
        **LLAMA.keys,
        "num_key_value_heads": Key(optional(SIZE), "n_kv_heads", 4),
        "no_rope_layers": Key(optional(FLAGS), "rope_layers", None),
        "no_rope_layer_interval": Key(SIZE, default=4),
        "use_sliding_window": Key(only(False), default=False),
        "layer_types": Key(optional(KINDS)),
        "sliding_window": Key(ANYTHING),
        "max_window_layers": Key(ANYTHING),
        "pad_token_id": NO_PADDING,  # the default, 128004, may lie outside the vocabulary
    },
    theta=2e6,
    read=_read_smollm3,
    write=_write_smollm3,
)


def _read_phi3(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with one `partial_rotary_factor`, and LongRoPE's length where it counts.

    Raises InputError if the places of the factor contradict each other.
    """
    found = [values["partial_rotary_factor"]]
    for place in ("rope_parameters", "rope_scaling"):
        if not values.get(place):
            continue
        entries = values[place] = dict(values[place])
        found.append(entries.pop("partial_rotary_factor", None))
        # transformers prefers the length beside the scaling to the one in it.
        if entries.get("rope_type", entries.get("type")) == "longrope":
            entries[rope_scaling.LENGTH] = values[rope_scaling.LENGTH]
    factors = {factor for factor in found if factor is not None}
    if len(factors) > 1 or not all(map(FRACTION.accepts, factors)):
        raise unsupported(
            values,
            f"config.json has partial_rotary_factor: {sorted(factors)}; "
            f"supported: {FRACTION.words}, the same in all places",
        )
    return {**values, "partial_rotary_factor": float(factors.pop()) if factors else 1.0}


def _write_phi3(arch: Architecture) -> dict[str, Any]:
    scaling, factor = arch.rope_scaling, {"partial_rotary_factor": arch.partial_rotary_factor}
    original = scaling.original_max_seq_len if isinstance(scaling, LongRopeScaling) else None
    return {
        "rope_parameters": rope_scaling.entries(arch)["rope_parameters"] | factor,
        rope_scaling.LENGTH: original or arch.max_seq_len,
    }


def _fused(hf_name: str, *dtt_names: str) -> WeightRule:
    names = tuple(f"layers.{{i}}.{name}.weight" for name in dtt_names)
    return WeightRule(f"{LAYER}.{hf_name}.weight", names)


# Phi-3 and Phi-4 (Abdin et al., 2024, arXiv 2404.14219, 2412.08905): Llama with fused projections.
# Queries, keys and values share one tensor in a Hugging Face folder, and so do gate and up. Models
# with a long context (the 128k variants, Phi-4-mini) have LongRoPE.
PHI3 = replace(
    LLAMA,
    name="phi3",
    hf_class="Phi3ForCausalLM",
    window_keys=("sliding_window",),
    keys={
        **LLAMA.keys,
        "head_dim": Key(SIZE, "head_dim", None),
        "rms_norm_eps": Key(NUMBER, "norm_eps", 1e-5),
        "partial_rotary_factor": Key(optional(FRACTION), "partial_rotary_factor", None),
        rope_scaling.LENGTH: Key(SIZE, default=4096),
        "sliding_window": Key(optional(SIZE)),
        "resid_pdrop": Key(SHARE, writes=0.0),
        "embd_pdrop": Key(ANYTHING, writes=0.0),
        # Published folders have it; transformers and dtt use their own class instead.
        "auto_map": Key(ANYTHING),
        "pad_token_id": NO_PADDING,  # the default, 32000, may lie outside the vocabulary
    },
    rope_types=("default", "longrope"),
    read=_read_phi3,
    write=_write_phi3,
    weights=(
        *(r for r in LLAMA.weights if not r.hf_name.endswith(UNFUSED)),
        _fused("self_attn.qkv_proj", "attn.q", "attn.k", "attn.v"),
        _fused("mlp.gate_up_proj", "mlp.gate", "mlp.up"),
    ),
)

# OLMo 2 (OLMo Team, 2024, arXiv 2501.00656): Llama with post-norms and QK norm over all heads.
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    hf_class="Olmo2ForCausalLM",
    axes={"norm_placement": "post", "qk_norm": "all_heads"},
    keys={
        **LLAMA.keys,
        "rms_norm_eps": Key(NUMBER, "norm_eps", 1e-5),
        "pad_token_id": NO_PADDING,  # the default, 1, is an id of the vocabulary
    },
    weights=(
        *(r for r in BODY if not r.dtt_names[0].endswith("attn_norm.weight")),
        *QK_NORM,
        *renamed(POST_NORMS),
    ),
)

# OLMo 3 (OLMo Team, 2025): OLMo 2 with a sliding window in most layers. RoPE scaling applies to the
# layers without a window only.
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    hf_class="Olmo3ForCausalLM",
    window_pattern=(4096, 4),
    window_keys=("sliding_window", "layer_types"),
    keys={
        **OLMO2.keys,
        "sliding_window": Key(optional(SIZE), default=4096),
        "layer_types": Key(optional(KINDS)),
    },
    theta=500_000.0,
    local_theta=500_000.0,
)


# Gemma 3, text models only (Gemma Team, 2025, arXiv 2503.19786). Most layers have a sliding window,
# with their own RoPE base. RMSNorm with 1 + weight is applied before and after attention and MLP,
# and to queries and keys. The MLP is GeGLU, embeddings are multiplied by sqrt(dim), and the head is
# tied.
GEMMA3 = replace(
    LLAMA,
    name="gemma3",
    other_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    axes={
        "norm": "rmsnorm_plus_one",
        "qk_norm": "head",
        "norm_placement": "sandwich",
        "mlp": "geglu",
    },
    scaled_embedding=True,
    window_pattern=(512, 6),  # the window of the 270M and 1B models
    window_keys=("sliding_window", "layer_types"),
    keys={
        **{name: key for name, key in LLAMA.keys.items() if name != "hidden_act"},
        "hidden_activation": Key(only("gelu_pytorch_tanh"), writes="gelu_pytorch_tanh"),
        "head_dim": Key(SIZE, "head_dim", 256),
        "num_key_value_heads": Key(SIZE, "n_kv_heads", 4),
        "rope_local_base_freq": Key(NUMBER, "rope_local_theta", None),
        "sliding_window": Key(optional(SIZE), default=4096),
        "sliding_window_pattern": Key(SIZE),
        "_sliding_window_pattern": Key(ANYTHING),  # transformers writes it, but never reads it
        "layer_types": Key(optional(KINDS)),
        "query_pre_attn_scalar": Key(SIZE, "attn_scale", 256),
        "final_logit_softcapping": Key(optional(NUMBER), "logit_softcap", None),
        "attn_logit_softcapping": Key(only(None)),
        "use_bidirectional_attention": Key(only(False, None)),
        "pad_token_id": NO_PADDING,
    },
    theta=1e6,
    local_theta=1e4,
    read=lambda values: {
        **values,
        "query_pre_attn_scalar": values["query_pre_attn_scalar"] ** -0.5,
    },
    # transformers reads an integer and takes its inverse root. muP's multiplier may round to 0.
    write=lambda arch: {"query_pre_attn_scalar": max(1, round(arch.attn_scale**-2))},
    weights=(
        *BODY,
        *QK_NORM,
        *renamed({**POST_NORMS, f"{LAYER}.pre_feedforward_layernorm": "layers.{i}.mlp_norm"}),
    ),
)


def _conv1d(hf_name: str, *dtt_names: str) -> tuple[WeightRule, ...]:
    """Return the rules of a linear layer; GPT-2's Conv1D stores its weight as [in, out]."""
    weights, biases = (
        tuple(f"layers.{{i}}.{name}.{kind}" for name in dtt_names) for kind in ("weight", "bias")
    )
    layer = f"transformer.h.{{i}}.{hf_name}"
    return (
        WeightRule(f"{layer}.weight", weights, transpose=True),
        WeightRule(f"{layer}.bias", biases),
    )


# GPT-2 (Radford et al., 2019): learned positions, pre-LayerNorm, tanh-GELU, biases, tied head.
GPT2 = DecoderFamily(
    name="gpt2",
    hf_class="GPT2LMHeadModel",
    axes={
        "norm": "layernorm",
        "position": "learned",
        "rope_theta": ModelConfig().rope_theta,
        "rope_scaling": NoRopeScaling(),
        "mlp": "gelu",
        "bias": "all",
    },
    keys={
        "n_positions": Key(SIZE, "max_seq_len"),
        "n_embd": Key(SIZE, "dim"),
        "n_layer": Key(SIZE, "n_layers"),
        "n_head": Key(SIZE, "n_heads"),
        "n_inner": Key(optional(SIZE), "ffn_dim", None),
        "activation_function": Key(only("gelu_new", "gelu_pytorch_tanh"), writes="gelu_new"),
        "layer_norm_epsilon": Key(NUMBER, "norm_eps", 1e-5),
        "embd_pdrop": Key(SHARE, "dropout", 0.1),
        "resid_pdrop": Key(SHARE, "dropout", 0.1),  # after the other, so that this one counts
        # dtt applies no dropout to attention probabilities, so the export must not either.
        "attn_pdrop": Key(SHARE, writes=0.0),
        "scale_attn_weights": Key(only(True)),
        "scale_attn_by_inverse_layer_idx": Key(only(False)),
        **without_effect(
            "n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation "
            "summary_proj_to_labels summary_first_dropout"
        ),
    },
    weights=(
        *renamed({"transformer.wte": "embed", "transformer.wpe": "pos_embed", "lm_head": "head"}),
        *renamed(
            {
                "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
                "transformer.h.{i}.ln_2": "layers.{i}.mlp_norm",
                "transformer.ln_f": "norm",
            },
            "weight",
            "bias",
        ),
        *_conv1d("attn.c_attn", "attn.q", "attn.k", "attn.v"),
        *_conv1d("attn.c_proj", "attn.o"),
        *_conv1d("mlp.c_fc", "mlp.up"),
        *_conv1d("mlp.c_proj", "mlp.down"),
    ),
)
