"""The shipped models are what the config.json of the published ones says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers
import yaml

from dtt.config.model import ModelConfig
from dtt.config.shipped import shipped_configs
from dtt.model import families
from dtt.model.families import multimodal

LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA_3_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM3 = {
    "model_type": "smollm3",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
OLMO2 = {
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "vocab_size": 262144,
}

PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def sizes(dim: int, ffn_dim: int, n_layers: int) -> dict[str, Any]:
    return {"hidden_size": dim, "intermediate_size": ffn_dim, "num_hidden_layers": n_layers}


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    },
    "llama2-7b": {
        **LLAMA_3_8B,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 32000,
    },
    "llama3-8b": LLAMA_3_8B | {"max_position_embeddings": 8192, "rope_scaling": None},
    "llama3.1-8b": LLAMA_3_8B | {"rope_scaling": SCALING},
    "llama3.2-1b": LLAMA
    | sizes(2048, 8192, 16)
    | {
        "head_dim": 64,
        "num_attention_heads": 32,
        "rope_scaling": SCALING | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama3.2-3b": LLAMA
    | sizes(3072, 8192, 28)
    | {
        "head_dim": 128,
        "num_attention_heads": 24,
        "rope_scaling": SCALING | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "mistral-7b-v0.1": MISTRAL
    | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "mistral-7b-v0.3": MISTRAL
    | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "qwen3-0.6b": QWEN3
    | sizes(1024, 3072, 28)
    | {"max_window_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3
    | sizes(4096, 12288, 36)
    | {"max_window_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen2.5-0.5b": QWEN2 | sizes(896, 4864, 24),
    "smollm3-3b": SMOLLM3 | sizes(2048, 11008, 36),
    "olmo2-1b": OLMO2 | sizes(2048, 8192, 16),
    "phi3-mini-4k": PHI3
    | sizes(3072, 8192, 32)
    | {
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "vocab_size": 32064,
    },
    "phi4": PHI3
    | sizes(5120, 17920, 40)
    | {
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "pad_token_id": 100257,
        "rope_theta": 250000,
        "sliding_window": None,
        "vocab_size": 100352,
    },
    "gemma3-270m": GEMMA3
    | sizes(640, 2048, 18)
    | {
        "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "use_bidirectional_attention": False,
    },
    "gemma3-4b": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "gemma3-1b": GEMMA3 | sizes(1152, 6912, 26) | {"sliding_window_pattern": 6},
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("version", ["as published", "as this transformers has it"])
def test_a_shipped_model_is_the_published_one(name: str, version: str) -> None:
    config = PUBLISHED[name]
    if version != "as published":
        built: Any = transformers.AutoConfig.for_model(**config)
        config = built.to_dict()
    text = (shipped_configs() / "models" / f"{name}.yaml").read_text()
    cfg = ModelConfig(**yaml.safe_load(text)["model"])
    family = families.get(cfg.family)
    found = dataclasses.replace(family.from_hf_config(multimodal.text_config(config)), dropout=0.0)
    assert found == family.architecture(cfg, cfg.vocab_size or 0, 1024)
