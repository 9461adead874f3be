"""OLMoE (Muennighoff et al., 2024, arXiv 2409.02060): Llama with QK norm and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.families import llama, mixture_rules
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import FLAG, SIZE, only


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; scores are not divided by their sum unless `norm_topk` is set."""
    arch = replace(llama.architecture(cfg, tokenizer_size, seq_len), qk_norm="all_heads")
    return mixture_rules.with_mixture(arch, cfg, "olmoe", norm_topk=False)


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of an OlmoeForCausalLM's config.json."""
    experts = arch.mixture
    assert experts is not None
    return llama.hf_facts(arch) | {
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalise,
        "clip_qkv": None,
        # The default is 1: transformers would not train that embedding.
        "pad_token_id": None,
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that an OlmoeForCausalLM's config.json describes."""
    arch = llama.read_hf_config({"rms_norm_eps": 1e-5, **config})
    experts = ExpertMixture(
        experts=config.get("num_experts", 64),
        per_token=config.get("num_experts_per_tok", 8),
        ffn_dim=arch.ffn_dim,
        normalise=config.get("norm_topk_prob", False),
    )
    mixture_rules.check(config, experts)
    return replace(arch, family="olmoe", qk_norm="all_heads", mixture=experts)


OLMOE = DecoderFamily(
    name="olmoe",
    hf_model_type="olmoe",
    hf_class="OlmoeForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values={
        **llama.HF_VALUES,
        **mixture_rules.LOSSES,
        "num_experts": SIZE,
        "num_experts_per_tok": SIZE,
        "norm_topk_prob": FLAG,
        # Other values cut off queries, keys and values, which dtt does not do.
        "clip_qkv": only(None),
    },
    read_hf_config=read_hf_config,
    weights=(*llama.LLAMA.weights, *llama.QK_NORM, *mixture_rules.USUAL_RULES),
)
