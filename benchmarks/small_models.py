"""Small configurations of the causal models of transformers, and folders with parts for images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "dim_model", "lru_width",
         "word_embed_proj_dim", "embedding_dim", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "dim_ff", "dff", "d_inner",
         "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 96
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks",
         "num_decoder_layers"), 4
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "attention_heads", "swa_num_attention_heads", "num_decoder_attention_heads",
         "linear_num_heads", "linear_num_value_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads",
         "index_n_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "linear_head_dim",
         "linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "v_head_dim",
         "index_head_dim", "mamba_d_head", "mamba_head_dim", "global_head_dim"), 16
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": 24,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts",
         "n_group", "num_expert_group"), 2
    ),
    "topk_group": 1,
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
         "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 24),
    **dict.fromkeys(
        ("mamba_d_state", "state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size",
         "block_size", "mamba_dt_rank", "time_step_rank"), 16
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size",
         "local_attention", "attention_chunk_size", "index_topk"), 64
    ),
}  # fmt: skip
"""Small sizes, by the names that the library's configurations have for them."""
VOCABULARY = 320
"""Token ids: those of the tokenizer of the documents, rounded up."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCABULARY,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "layer_types": HYBRID,
        "output_gate_type": "sigmoid",
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "hybrid_layer_ids": [1, 3],
        "num_query_groups": 4,
        "kv_channels": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What the rules above do not reach, by type."""

PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {"sliding_window": 8}},
    "llava": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3"},
        "vision_config": {"model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_5": {},
    "gemma3n": {"vision_config": {"architecture": "resnet18"}},
    "got_ocr2": {"vision_config": {"output_channels": 16}},
    "llama4": {
        "vision_config": dict.fromkeys(
            ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64
        )
    },
}
"""The same for types with parts."""
OF_IMAGES = {
    "image_size": 28, "patch_size": 14, "depth": 1, "num_hidden_layers": 1, "out_hidden_size": 64,
    "num_key_value_heads": 4,
}  # fmt: skip
"""Small sizes of a part for images."""


def tiny(kind: str) -> dict[str, Any]:
    """Return the default config.json of a type, made small."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind).to_dict()
    config = {key: size for key, size in SIZES.items() if type(default.get(key)) is int}
    if "qk_rope_head_dim" in config:
        # Latent attention: what rotates is a head of its own, and no heads share keys.
        config |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in default else {})
    return {"model_type": kind, **config, **MORE.get(kind, {})}


def text_type(kind: str) -> str | None:
    """Return the type of the causal text model inside a type with parts; None without one."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    whole: Any = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = AutoConfig.for_model(kind)
    if kind not in whole or "text_config" not in known.sub_configs:
        return None
    text = PARTS.get(kind, {}).get("text_config", {})
    found = text.get("model_type", known.get_text_config().model_type)
    return found if found in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def write_whole(kind: str, text: str, folder: Path, tokens: Path) -> None:
    """Write a small folder of a type with parts, with initial values."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    more, parts = PARTS.get(kind, {}), {}
    for name, part in AutoConfig.for_model(kind).to_dict().items():
        if name.endswith("_config") and isinstance(part, dict):
            small = {
                key: size for key, size in (SIZES | OF_IMAGES).items() if type(part.get(key)) is int
            }
            parts[name] = {"model_type": part.get("model_type"), **small, **more.get(name, {})}
    parts["text_config"] = {**tiny(text), **more.get("text_config", {}), "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(kind, **parts)
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    shutil.copyfile(tokens / "tokenizer.json", folder / "tokenizer.json")
