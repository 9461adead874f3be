"""OLMo 3 (OLMo Team, 2025): OLMo 2 with a sliding window in most layers.

RoPE scaling applies to the layers without a window only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import attention_windows, llama, olmo2, rope_scaling
from dtt.model.families.attention_windows import FULL, LOCAL, every_nth
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import KINDS, SIZE, optional, unsupported

WINDOW, INTERVAL = 4096, 4
"""Sliding window in tokens, and the interval of layers without one."""
THETA = 500_000.0
"""RoPE base of a config.json without one."""


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; every `window_pattern`-th layer has no window."""
    window, interval = cfg.window or WINDOW, cfg.window_pattern or INTERVAL
    return replace(
        olmo2.architecture(cfg, tokenizer_size, seq_len),
        family="olmo3",
        windows=tuple(
            window if kind == LOCAL else None for kind in every_nth(cfg.n_layers, interval)
        ),
        rope_local_theta=cfg.rope_theta,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of an Olmo3ForCausalLM's config.json.

    RoPE is written for old and new versions of transformers.
    """
    config = olmo2.hf_facts(arch)
    return config | {
        "sliding_window": next((w for w in arch.windows if w is not None), WINDOW),
        "layer_types": attention_windows.to_hf(arch.windows),
        "rope_parameters": {
            FULL: config["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": arch.rope_local_theta},
        },
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that an Olmo3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    # Without a base of its own, transformers 5 uses the default in layers with a window; 4 used
    # rope_theta. Only a file in which both are the same has one meaning.
    full, local_theta = rope_scaling.by_layer_type(config, None, THETA)
    arch = olmo2.read_hf_config(full, THETA)
    windows = attention_windows.from_hf(
        config, config.get("sliding_window", WINDOW), every_nth(arch.n_layers, INTERVAL)
    )
    if any(windows) and local_theta != arch.rope_theta:
        raise unsupported(
            config,
            f"the base of RoPE is {arch.rope_theta} in {FULL} and {local_theta} in {LOCAL}; "
            "supported: the same in both",
            next="write rope_theta for both into rope_parameters of config.json, or use another "
            "model",
        )
    return replace(arch, family="olmo3", windows=windows, rope_local_theta=arch.rope_theta)


OLMO3 = DecoderFamily(
    name="olmo3",
    hf_model_type="olmo3",
    hf_class="Olmo3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=llama.HF_VALUES | {"sliding_window": optional(SIZE), "layer_types": optional(KINDS)},
    read_hf_config=read_hf_config,
    weights=olmo2.WEIGHTS,
)
