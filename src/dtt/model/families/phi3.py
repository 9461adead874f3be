"""Phi-3 and Phi-4 (Abdin et al., 2024, arXiv 2404.14219, 2412.08905): Llama with fused projections.

Queries, keys and values share one tensor in a Hugging Face folder, and so do gate and up. Models
with a long context (the 128k variants, Phi-4-mini) have LongRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import LongRopeScaling, ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import DecoderFamily, WeightRule, same_name
from dtt.model.families.hf_config import (
    FRACTION,
    SHARE,
    SIZE,
    optional,
    unsupported,
    without_effect,
)
from dtt.model.families.llama import LAYER


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(
        arch,
        family="phi3",
        windows=(cfg.window,) * arch.n_layers,
        partial_rotary_factor=cfg.partial_rotary_factor,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Phi3ForCausalLM's config.json."""
    config, scaling = llama.hf_facts(arch), arch.rope_scaling
    original = scaling.original_max_seq_len if isinstance(scaling, LongRopeScaling) else None
    factor = {"partial_rotary_factor": arch.partial_rotary_factor}
    return config | {
        "rope_parameters": config["rope_parameters"] | factor,
        **factor,
        "original_max_position_embeddings": original or arch.max_seq_len,
        "sliding_window": arch.windows[0],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": None,  # the default, 32000, may lie outside the vocabulary
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Phi3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    config, factor = _without_partial_factor(config)
    original = config.get("original_max_position_embeddings", 4096)
    for place in ("rope_parameters", "rope_scaling"):
        entries = config.get(place) or {}
        # transformers prefers the length beside the scaling to the one in it.
        if entries.get("rope_type", entries.get("type")) == "longrope":
            config = {**config, place: entries | {"original_max_position_embeddings": original}}
    arch = llama.read_hf_config(
        {"rms_norm_eps": 1e-5, **config}, rope_types=("default", "longrope")
    )
    window = config.get("sliding_window")
    return replace(
        arch,
        family="phi3",
        windows=(window,) * arch.n_layers,
        partial_rotary_factor=factor,
    )


def _without_partial_factor(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return config.json without `partial_rotary_factor`, and its value.

    Raises InputError if its places contradict each other.
    """
    rest = dict(config)
    found = [rest.pop("partial_rotary_factor", None)]
    for place in ("rope_parameters", "rope_scaling"):
        if rest.get(place):
            rest[place] = dict(rest[place])
            found.append(rest[place].pop("partial_rotary_factor", None))
    values = {value for value in found if value is not None}
    if len(values) > 1 or not all(map(FRACTION.accepts, values)):
        raise unsupported(
            config,
            f"config.json has partial_rotary_factor: {sorted(values)}; "
            f"supported: {FRACTION.words}, the same in all places",
        )
    return rest, float(values.pop()) if values else 1.0


def _fused(hf_name: str, *dtt_names: str) -> WeightRule:
    return WeightRule(
        f"{LAYER}.{hf_name}.weight", tuple(f"layers.{{i}}.{n}.weight" for n in dtt_names)
    )


PHI3 = DecoderFamily(
    name="phi3",
    hf_model_type="phi3",
    hf_class="Phi3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    # Published folders have an auto_map; transformers and dtt use their own class instead.
    hf_values=llama.HF_VALUES
    | {
        "head_dim": SIZE,
        "partial_rotary_factor": optional(FRACTION),
        "sliding_window": optional(SIZE),
        "resid_pdrop": SHARE,
        "original_max_position_embeddings": SIZE,
    }
    | without_effect("embd_pdrop auto_map"),
    read_hf_config=read_hf_config,
    weights=(
        *same_name("model.embed_tokens", "embed", "weight"),
        *same_name(f"{LAYER}.input_layernorm", "layers.{i}.attn_norm", "weight"),
        _fused("self_attn.qkv_proj", "attn.q", "attn.k", "attn.v"),
        *same_name(f"{LAYER}.self_attn.o_proj", "layers.{i}.attn.o", "weight"),
        *llama.MLP_NORM,
        _fused("mlp.gate_up_proj", "mlp.gate", "mlp.up"),
        *same_name(f"{LAYER}.mlp.down_proj", "layers.{i}.mlp.down", "weight"),
        *same_name("model.norm", "norm", "weight"),
        *same_name("lm_head", "head", "weight"),
    ),
)
