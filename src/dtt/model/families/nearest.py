"""Differences between models that dtt does not read and the most similar family that it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import COMMON

DIFFERENCES: Mapping[str, tuple[str, str]] = {
    "arcee": ("llama", "its MLP has no gate (squared ReLU)"),
    "cohere": ("llama", "LayerNorm, attention and MLP in parallel, scaled logits"),
    "cohere2": ("llama", "LayerNorm, attention and MLP in parallel, scaled logits"),
    "deepseek_v2": ("dots1", "multi-head latent attention"),
    "deepseek_v3": ("dots1", "multi-head latent attention"),
    "falcon": ("gpt2", "rotary positions or ALiBi, attention and MLP in parallel"),
    "gemma": ("gemma3", "no norms of queries and keys, nor after attention and MLP"),
    "gemma2": ("gemma3", "a soft cap of attention scores, no norms of queries and keys"),
    "glm": ("llama", "a rotary embedding of neighbouring pairs, in a part of each head"),
    "glm4": ("llama", "a rotary embedding of neighbouring pairs, in a part of each head"),
    "gpt_neox": ("gpt2", "rotary positions, attention and MLP in parallel"),
    "gpt_oss": ("mixtral", "attention sinks, biases, and another activation of experts"),
    "gptj": ("gpt2", "rotary positions, attention and MLP in parallel"),
    "granite": ("llama", "multipliers of embeddings, attention, residuals and logits"),
    "llama4": ("mixtral", "chunked attention, a shared expert, scores that scale the input"),
    "llama4_text": ("mixtral", "chunked attention, a shared expert, scores that scale the input"),
    "mistral3": ("mistral", "images"),
    "mllama": ("llama", "images, in layers with cross-attention"),
    "nemotron": ("llama", "LayerNorm, and an MLP without a gate (squared ReLU)"),
    "olmo": ("olmo2", "LayerNorm without weights, before attention and MLP"),
    "opt": ("gpt2", "ReLU, and positions that start at 2"),
    "phi": ("phi3", "LayerNorm, biases, attention and MLP in parallel"),
    "qwen2_5_vl": ("qwen2", "images, and rotary positions in three dimensions"),
    "qwen2_moe": ("qwen3_moe", "a shared expert with a gate of its own, biases, no query norms"),
    "qwen2_vl": ("qwen2", "images, and rotary positions in three dimensions"),
    "qwen3_next": ("qwen3_moe", "linear attention in most layers"),
    "qwen3_vl": ("qwen3", "images, and rotary positions in three dimensions"),
    "stablelm": ("llama", "LayerNorm, and a rotary embedding of a part of each head"),
    "starcoder2": ("qwen2", "LayerNorm, and an MLP without a gate"),
}  # fmt: skip
"""The nearest family of a `model_type`, and what it does not have."""


def nearest(config: Mapping[str, Any], families: Sequence[DecoderFamily]) -> str | None:
    """Return the family nearest to an unsupported config.json and what differs, for a message.

    Without an entry of its own, a model is compared with the family whose name is most similar:
    what differs is then listed by the keys that only its config.json has.
    """
    kind = str(config.get("model_type"))
    if kind in DIFFERENCES:
        family, what = DIFFERENCES[kind]
        return f"the nearest is {family}, which does not have: {what}"
    names = {family.hf_model_type: family for family in families}
    close = get_close_matches(kind, names, n=1, cutoff=0.6)
    if not close:
        return None
    found = names[close[0]]
    keys = sorted(config.keys() - COMMON.keys() - found.hf_values.keys())
    other = f"whose config.json has no {', '.join(keys[:8])}" if keys else "by its name"
    return f"the nearest is {found.name}, {other}"
