"""Qwen3 (Yang et al., 2025, arXiv 2505.09388), dense: Qwen2 with QK norm instead of biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama, qwen2
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import SIZE, only

AXES: Mapping[str, Any] = {"family": "qwen3", "bias": "none", "qk_norm": "head"}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    return replace(qwen2.architecture(cfg, tokenizer_size, seq_len), **AXES)


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Qwen3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    # Files may omit it: the default of transformers is not derived from other sizes.
    return replace(qwen2.read_hf_config({"head_dim": 128, **config}), **AXES)


QWEN3 = DecoderFamily(
    name="qwen3",
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    architecture=architecture,
    hf_facts=qwen2.hf_facts,
    hf_values={**qwen2.HF_VALUES, "attention_bias": only(False), "head_dim": SIZE},
    read_hf_config=read_hf_config,
    weights=(*llama.LLAMA.weights, *llama.QK_NORM),
)
