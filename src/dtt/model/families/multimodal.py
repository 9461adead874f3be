"""The text model inside a multimodal Hugging Face folder: its config.json and its weight names.

dtt reads Gemma 3's (4B and larger), whose `text_config` is the config.json of the text model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtt.model.families.hf_config import OBJECT, check_values, only, unsupported, without_effect

MODEL_TYPE, CLASS = "gemma3", "Gemma3ForConditionalGeneration"
TEXT_TYPE = "gemma3_text"
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
"""Sizes that `text_config` may leave out; the file of the 4B model does."""
KEYS = {
    "text_config": OBJECT,
    # Gemma3Config ties the head whatever text_config says.
    "tie_word_embeddings": only(True, None),
    **without_effect("vision_config mm_tokens_per_image boi_token_index eoi_token_index"),
    **without_effect("image_token_index image_token_id boi_token_id eoi_token_id auto_map"),
}
VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
# The first form is that of published files, the second that of modules in transformers 5.
LANGUAGE = re.compile(r"language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return True if config.json describes a multimodal model whose text model dtt can read."""
    return config.get("model_type") == MODEL_TYPE


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model; that of a text model is returned as is.

    Raises InputError for keys beside `text_config` that dtt does not know.
    """
    if not is_multimodal(config):
        return config
    check_values(config, KEYS, dict)
    text = config.get("text_config") or {}
    if text.get("model_type", TEXT_TYPE) != TEXT_TYPE:
        raise unsupported(
            config,
            f"config.json has model_type: {text['model_type']!r} in text_config; "
            f"supported: {TEXT_TYPE!r}",
        )
    if text.get("tie_word_embeddings") is False:
        raise unsupported(config, "config.json has tie_word_embeddings: False in text_config")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key)}
    return {**DEFAULTS, **text, **ids, "model_type": TEXT_TYPE}


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model, or None for one of the vision model."""
    return None if VISION.match(name) else LANGUAGE.sub("", name, count=1)
