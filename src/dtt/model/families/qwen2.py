"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv 2407.10671, 2412.15115), dense.

Llama with biases of queries, keys and values. With `use_sliding_window`, the layers from
`max_window_layers` on have a sliding window; the released models do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import attention_windows, llama
from dtt.model.families.attention_windows import FULL, LOCAL
from dtt.model.families.base import DecoderFamily, same_name
from dtt.model.families.hf_config import COUNT, FLAG, KINDS, SIZE, Values, only, optional
from dtt.model.families.llama import LAYER


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    full = min(cfg.max_window_layers, cfg.n_layers)
    return replace(
        llama.architecture(cfg, tokenizer_size, seq_len),
        family="qwen2",
        bias="qkv",
        windows=(None,) * full + (cfg.window,) * (cfg.n_layers - full),
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Qwen2ForCausalLM's config.json."""
    window = next((w for w in arch.windows if w is not None), None)
    return llama.hf_facts(arch) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # Of versions of transformers that do not read layer_types.
        "max_window_layers": arch.windows.index(window) if window else arch.n_layers,
        "layer_types": attention_windows.to_hf(arch.windows),
    }


HF_VALUES: Mapping[str, Values] = {
    **llama.HF_VALUES,
    # transformers ignores it and always has these biases.
    "attention_bias": only(True),
    "use_sliding_window": FLAG,
    "sliding_window": optional(SIZE),
    "max_window_layers": COUNT,
    "layer_types": optional(KINDS),
}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Qwen2ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    arch = llama.read_hf_config({"num_key_value_heads": 32, **config})
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    kinds = [FULL if window is None or i < first else LOCAL for i in range(arch.n_layers)]
    windows = attention_windows.from_hf(config, window, kinds)
    return replace(arch, family="qwen2", bias="qkv", windows=windows)


QWEN2 = DecoderFamily(
    name="qwen2",
    hf_model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(
        *llama.LLAMA.weights,
        *(
            rule
            for part in "qkv"
            for rule in same_name(
                f"{LAYER}.self_attn.{part}_proj", f"layers.{{i}}.attn.{part}", "bias"
            )
        ),
    ),
)
