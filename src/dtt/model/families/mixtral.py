"""Mixtral (Jiang et al., 2024, arXiv 2401.04088): Mistral with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.families import llama, mistral, mixture_rules
from dtt.model.families.base import DecoderFamily
from dtt.model.families.hf_config import SIZE, only


def architecture(cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
    """Resolve the config; missing values have the defaults of Llama."""
    arch = mistral.architecture(cfg, tokenizer_size, seq_len)
    return mixture_rules.with_mixture(arch, cfg, "mixtral")


def hf_facts(arch: Architecture) -> dict[str, Any]:
    """Return the entries of a MixtralForCausalLM's config.json."""
    assert arch.mixture is not None
    return mistral.hf_facts(arch) | {
        "num_local_experts": arch.mixture.experts,
        "num_experts_per_tok": arch.mixture.per_token,
    }


def read_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a MixtralForCausalLM's config.json describes."""
    # The defaults of transformers differ from those of Mistral.
    arch = mistral.read_hf_config({"sliding_window": None, **config}, theta=1e6)
    experts = ExpertMixture(
        experts=config.get("num_local_experts", 8),
        per_token=config.get("num_experts_per_tok", 2),
        ffn_dim=arch.ffn_dim,
    )
    mixture_rules.check(config, experts)
    return replace(arch, family="mixtral", mixture=experts)


MIXTRAL = DecoderFamily(
    name="mixtral",
    hf_model_type="mixtral",
    hf_class="MixtralForCausalLM",
    architecture=architecture,
    hf_facts=hf_facts,
    hf_values={
        **mistral.MISTRAL.hf_values,
        **mixture_rules.LOSSES,
        # transformers refuses null here, unlike for most other families.
        "num_key_value_heads": SIZE,
        "num_local_experts": SIZE,
        "num_experts_per_tok": SIZE,
        "router_jitter_noise": only(0.0),
    },
    read_hf_config=read_hf_config,
    weights=(
        *(rule for rule in llama.LLAMA.weights if ".mlp." not in rule.hf_name),
        *mixture_rules.expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    ),
)
