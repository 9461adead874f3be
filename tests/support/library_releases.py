"""config.json of released models that `transformers` computes, with a layer of each kind.

The sizes are those of the releases; keys that are left out have the defaults of the classes, which
are those of Qwen3.5 9B, Ministral 3 8B and gpt-oss.
"""

from __future__ import annotations

from typing import Any

RELEASES: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    },
    "gemma4-e4b": {
        "model_type": "gemma4", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size_per_layer_input": 256,
            "final_logit_softcapping": 30.0, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "ministral3-8b": {
        "model_type": "mistral3", "tie_word_embeddings": False,
        "text_config": {"model_type": "ministral3", "num_hidden_layers": 2},
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 32},
    "granite4-h-micro": {
        "model_type": "granitemoehybrid", "hidden_size": 2048, "intermediate_size": 8192,
        "shared_intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 100352,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 64, "mamba_d_head": 64,
        "mamba_d_state": 128, "attention_multiplier": 0.015625, "embedding_multiplier": 12,
        "logits_scaling": 8, "residual_multiplier": 0.22, "position_embedding_type": "nope",
    },
}  # fmt: skip
