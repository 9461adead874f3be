"""Tiny multimodal models as transformers writes them, with a text model that dtt can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma4": (
        {**TEXT, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
         "num_hidden_layers": 3, "num_kv_shared_layers": 1,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3_5": (
        {**TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2,
         "out_hidden_size": 64},
    ),
    "llama4": (
        {**TEXT, "intermediate_size_mlp": 96, "num_local_experts": 4},
        {**VISION, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
         "image_size": 28, "patch_size": 14},
    ),
    "mistral3": (
        {**TEXT, "model_type": "ministral3"},
        {**VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    # The text model has a family of dtt's own.
    "gemma3": (
        {**TEXT, "sliding_window": 8}, {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "llava": (
        {**TEXT, "model_type": "mistral"},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    ),
}  # fmt: skip
"""Sizes of the text and the vision model, by the type of the whole."""


def write_multimodal(kind: str, folder: Path, tokenizer: Path) -> Any:
    """Write a model of a type with a tokenizer and settings for images; return the library's."""
    text, vision = PARTS[kind]
    config = transformers.AutoConfig.for_model(
        kind, text_config={**text, "eos_token_id": 0}, vision_config=vision, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 28}))
    return model
