"""Phi-3 and Phi-4 (Abdin et al., 2024, arXiv 2404.14219, 2412.08905): Llama with fused projections.

Queries, keys and values share one tensor in a Hugging Face folder, and so do gate and up. Models
with LongRoPE (the 128k variants, Phi-4-mini) are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig, NoRopeScaling
from dtt.model.architecture import Architecture
from dtt.model.families import llama
from dtt.model.families.base import Family, WeightRule, same_name
from dtt.model.families.hf_config import SHARE, SIZE, optional, unsupported, without_effect
from dtt.model.families.llama import LAYER


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = llama.architecture(cfg, tokenizer_size, seq_len)
    return replace(arch, family="phi3", windows=(cfg.window,) * arch.n_layers)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Phi3ForCausalLM's config.json."""
    return llama.hf_facts(arch) | {
        "original_max_position_embeddings": arch.max_seq_len,
        "sliding_window": arch.windows[0],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": None,  # the default, 32000, may lie outside the vocabulary
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Phi3ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers.
    """
    arch = llama.read_hf_config({"rms_norm_eps": 1e-5, **config})
    if arch.rope_scaling != NoRopeScaling():
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise unsupported(
            config, f"config.json has {key}: {config[key]}; supported: rope_type 'default'"
        )
    window = config.get("sliding_window")
    return replace(arch, family="phi3", windows=(window,) * arch.n_layers)


def _fused(hf_name: str, *dtt_names: str) -> WeightRule:
    return WeightRule(
        f"{LAYER}.{hf_name}.weight", tuple(f"layers.{{i}}.{n}.weight" for n in dtt_names)
    )


PHI3 = Family(
    name="phi3",
    hf_model_type="phi3",
    hf_class="Phi3ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    # Published folders have an auto_map; transformers and dtt use their own class instead.
    hf_values=llama.HF_VALUES
    | {"head_dim": SIZE, "sliding_window": optional(SIZE), "resid_pdrop": SHARE}
    | without_effect("embd_pdrop original_max_position_embeddings auto_map"),
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
