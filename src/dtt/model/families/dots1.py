"""dots.llm1 (Huo et al., 2025, arXiv 2506.05767): Qwen3 with DeepSeek-V3's routing.

Sigmoid scores, a correction of the choice that follows the load, groups of experts, a shared
expert, and ordinary MLPs in the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.families import attention_windows, llama, mixture_rules, qwen3
from dtt.model.families.attention_windows import FULL, LOCAL
from dtt.model.families.base import DecoderFamily, WeightRule, same_name
from dtt.model.families.hf_config import (
    COUNT,
    FLAG,
    KINDS,
    NUMBER,
    SIZE,
    Values,
    optional,
    unsupported,
)
from dtt.model.families.llama import LAYER

ROUTING: Mapping[str, Any] = {"scores": "sigmoid", "epsilon": 1e-20, "corrected": True}


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = qwen3.architecture(cfg, tokenizer_size, seq_len)
    return mixture_rules.with_mixture(
        arch,
        cfg,
        "dots1",
        dense_layers=cfg.n_dense_layers,
        shared_dim=cfg.n_shared_experts * (cfg.expert_ffn_dim or arch.ffn_dim),
        groups=cfg.n_expert_groups,
        groups_per_token=cfg.expert_groups_per_token,
        scale=cfg.routed_scaling,
        **ROUTING,
    )


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a Dots1ForCausalLM's config.json."""
    experts = arch.mixture
    assert experts is not None
    return llama.hf_facts(arch) | {
        "sliding_window": None,
        "layer_types": ["full_attention"] * arch.n_layers,
        "n_routed_experts": experts.experts,
        "n_shared_experts": experts.shared_dim // experts.ffn_dim,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn_dim,
        "first_k_dense_replace": experts.dense_layers,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
    }


HF_VALUES: Mapping[str, Values] = {
    **llama.HF_VALUES,
    **mixture_rules.LOSSES,
    "sliding_window": optional(SIZE),
    "max_window_layers": optional(COUNT),
    "layer_types": optional(KINDS),
    "n_routed_experts": SIZE,
    "n_shared_experts": SIZE,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "first_k_dense_replace": COUNT,
    "n_group": SIZE,
    "topk_group": SIZE,
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": NUMBER,
}


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Dots1ForCausalLM's config.json describes.

    Missing keys have the defaults of transformers. Raises InputError for layers with a window.
    """
    arch = llama.read_hf_config({"num_key_value_heads": 32, **config})
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 62)
    late = window is not None and first is not None
    kinds = [LOCAL if late and i >= first else FULL for i in range(arch.n_layers)]
    if any(attention_windows.from_hf(config, window, kinds)):
        raise unsupported(config, "sliding_window, layer_types: it has layers with a window")
    width = config.get("moe_intermediate_size", 1408)
    experts = ExpertMixture(
        experts=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_dim=width,
        shared_dim=config["n_shared_experts"] * width,
        dense_layers=config.get("first_k_dense_replace", 0),
        normalise=config.get("norm_topk_prob", False),
        groups=config.get("n_group", 1),
        groups_per_token=config.get("topk_group", 1),
        scale=config.get("routed_scaling_factor", 1.0),
        **ROUTING,
    )
    mixture_rules.check(config, experts)
    return replace(arch, family="dots1", qk_norm="head", mixture=experts)


CORRECTION = "mlp.gate.e_score_correction_bias"
SHARED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
DOTS1 = DecoderFamily(
    name="dots1",
    hf_model_type="dots1",
    hf_class="Dots1ForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values=HF_VALUES,
    read_hf_config=read_hf_config,
    weights=(
        *qwen3.QWEN3.weights,
        *mixture_rules.USUAL_RULES,
        WeightRule(f"{LAYER}.{CORRECTION}", (f"{mixture_rules.MLP}.router.balance",)),
        *(
            rule
            for hf, ours in SHARED.items()
            for rule in same_name(
                f"{LAYER}.mlp.shared_experts.{hf}", f"{mixture_rules.MLP}.shared.{ours}", "weight"
            )
        ),
    ),
)
