"""Qwen3 with a mixture of experts (Yang et al., 2025, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.families import llama, mixture_rules, qwen3
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import FLAG, SIZE, Values, only, optional, unsupported


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = qwen3.architecture(cfg, tokenizer_size, seq_len)
    return mixture_rules.with_mixture(arch, cfg, "qwen3_moe", dense_layers=cfg.n_dense_layers)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Qwen3MoeForCausalLM's config.json."""
    experts = arch.mixture
    assert experts is not None
    return llama.hf_facts(arch) | {
        "use_sliding_window": False,
        "sliding_window": None,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn_dim,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(experts.dense_layers)),
    }


INDICES = Values(
    "a list of integers",
    lambda v: isinstance(v, list) and all(type(i) is int for i in v),
)
HF_VALUES: Mapping[str, Values] = {
    **llama.HF_VALUES,
    **mixture_rules.LOSSES,
    # transformers refuses null here, unlike for most other families.
    "num_key_value_heads": SIZE,
    "use_sliding_window": only(False),
    "sliding_window": optional(SIZE),
    "max_window_layers": SIZE,
    # transformers 5 writes the second name, and reads both.
    "num_experts": SIZE,
    "num_local_experts": SIZE,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": only(1),
    "mlp_only_layers": optional(INDICES),
}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Qwen3MoeForCausalLM's config.json describes.

    Missing keys have the defaults of transformers. Raises InputError unless the layers without
    experts are the first ones.
    """
    arch = llama.read_hf_config({"num_key_value_heads": 4, **config})
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise unsupported(config, f"mlp_only_layers {dense} are not the first layers")
    experts = ExpertMixture(
        experts=config.get("num_local_experts", config.get("num_experts", 128)),
        per_token=config.get("num_experts_per_tok", 8),
        ffn_dim=config.get("moe_intermediate_size", 768),
        dense_layers=len(dense),
        normalise=config.get("norm_topk_prob", False),
    )
    mixture_rules.check(config, experts)
    return replace(arch, family="qwen3_moe", qk_norm="head", mixture=experts)


QWEN3_MOE = DecoderFamily(
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(*qwen3.QWEN3.weights, *mixture_rules.USUAL_RULES),
)
