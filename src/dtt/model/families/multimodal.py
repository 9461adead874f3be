"""The text model inside a multimodal Hugging Face folder: its config.json and its weight names.

`text_config` is the config.json of the text model, in which Gemma 3's (4B and larger) leaves out
sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtt.model.families.hf_config import (
    OBJECT,
    Key,
    check_values,
    only,
    unsupported,
    without_effect,
)

MODEL_TYPE = "gemma3"
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
OF_ALL = ("quantization_config", "auto_map")
"""Keys beside `text_config` that also hold for the text model."""
KEYS = {
    "text_config": Key(OBJECT),
    # Gemma3Config ties the head whatever text_config says.
    "tie_word_embeddings": Key(only(True, None)),
    **without_effect("vision_config mm_tokens_per_image boi_token_index eoi_token_index"),
    **without_effect("image_token_index image_token_id boi_token_id eoi_token_id auto_map"),
}
# The first form is that of published files, the second that of modules in transformers 5.
TEXT = re.compile(
    r"^(?:language|text)_model\.(?=model\.|lm_head\.)|(?<=^model\.)(?:language|text)_model\."
)
HEAD = "lm_head."
TIED = "tie_word_embeddings"


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return True if config.json describes a text model and others beside it."""
    return config.get("model_type") == MODEL_TYPE or isinstance(config.get("text_config"), dict)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model; that of a text model is returned as is.

    Raises InputError for keys beside `text_config` of a Gemma 3 that dtt does not know.
    """
    if not is_multimodal(config):
        return config
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key)}
    text = config.get("text_config") or {}
    if config["model_type"] != MODEL_TYPE:
        whole = {key: config[key] for key in OF_ALL if key in config}
        return {**text, **ids, **whole, **_defaults(config, text)}
    check_values(config, KEYS, dict)
    if text.get("model_type", TEXT_TYPE) != TEXT_TYPE:
        raise unsupported(
            config,
            f"config.json has model_type: {text['model_type']!r} in text_config; "
            f"supported: {TEXT_TYPE!r}",
        )
    if text.get(TIED) is False:
        raise unsupported(config, f"config.json has {TIED}: False in text_config")
    return {**DEFAULTS, **text, **ids, "model_type": TEXT_TYPE}


def _defaults(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of the text model, and if its head is tied, as the library takes them."""
    given = [part[TIED] for part in (config, text) if part.get(TIED) is not None]
    if given and "model_type" in text:
        # Which of the two counts depends on the class; the names of the weights prove it.
        return {TIED: any(given), "model_type": text["model_type"]}
    from transformers import AutoConfig

    try:
        known: Any = AutoConfig.for_model(str(config.get("model_type")))
        kind = text.get("model_type", known.get_text_config().model_type)
        return {TIED: any(given or [known.tie_word_embeddings]), "model_type": kind}
    except (ValueError, AttributeError) as error:
        raise unsupported(config, f"transformers cannot read its config.json: {error}") from error


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model, or None for one of another part."""
    found = TEXT.sub("", name, count=1)
    return found if found != name or name.startswith(HEAD) else None


def whole_name(name: str, like: str) -> str:
    """Return the name of a tensor of a text model in the whole one, of which `like` is another.

    The opposite of `text_name`.
    """
    inner, found = text_name(name) or name, TEXT.search(like)
    assert found is not None, "another tensor of the text model"
    if found.start() == 0:
        return f"{found[0]}{inner}"
    base, dot, rest = inner.partition(".")
    return inner if inner.startswith(HEAD) else f"{base}{dot}{found[0]}{rest}"
