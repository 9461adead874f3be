"""Families with a mixture of experts.

Hugging Face folders have three matrices of each expert; transformers joins them while it loads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtt.model.architecture import Architecture
from dtt.model.families.base import WeightRule, renamed
from dtt.model.families.dense import LAYER, LLAMA, MISTRAL, OLMO2, QK_NORM, QWEN3
from dtt.model.families.hf_config import (
    ANYTHING,
    COUNT,
    FLAG,
    KINDS,
    NUMBER,
    SIZE,
    Key,
    Values,
    only,
    optional,
    unsupported,
)

MLP = "layers.{i}.mlp"
LOSSES = {
    # Coefficients of losses that only training has.
    "router_aux_loss_coef": Key(NUMBER),
    "output_router_logits": Key(ANYTHING),
}


def _expert_rules(hf_mlp: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules of router and experts; `gate`, `up` and `down` are names of matrices."""
    names = {"gate": gate, "up": up, "down": down}
    return (
        *renamed({f"{LAYER}.{hf_mlp}.gate": f"{MLP}.router"}),
        *(
            WeightRule(f"{LAYER}.{hf_mlp}.experts.{{e}}.{hf}.weight", (f"{MLP}.experts.{ours}",))
            for ours, hf in names.items()
        ),
    )


USUAL_RULES = _expert_rules("mlp", "gate_proj", "up_proj", "down_proj")

# Mixtral (Jiang et al., 2024, arXiv 2401.04088): Mistral with a mixture of experts.
MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    hf_class="MixtralForCausalLM",
    keys={
        **MISTRAL.keys,
        **LOSSES,
        # transformers refuses null here, unlike for most other families.
        "num_key_value_heads": Key(SIZE, "n_kv_heads", 8),
        "sliding_window": Key(optional(SIZE)),
        "num_local_experts": Key(SIZE, "mixture.experts", 8),
        "num_experts_per_tok": Key(SIZE, "mixture.per_token", 2),
        "router_jitter_noise": Key(only(0.0)),
    },
    theta=1e6,
    weights=(
        *(rule for rule in LLAMA.weights if ".mlp." not in rule.hf_name),
        *_expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    ),
)

# OLMoE (Muennighoff et al., 2024, arXiv 2409.02060): Llama with QK norm and experts.
OLMOE = replace(
    LLAMA,
    name="olmoe",
    hf_class="OlmoeForCausalLM",
    axes={"qk_norm": "all_heads"},
    norm_topk=False,
    keys={
        **OLMO2.keys,
        **LOSSES,
        "num_experts": Key(SIZE, "mixture.experts", 64),
        "num_experts_per_tok": Key(SIZE, "mixture.per_token", 8),
        "norm_topk_prob": Key(FLAG, "mixture.normalise", False),
        # Other values cut off queries, keys and values, which dtt does not do.
        "clip_qkv": Key(only(None), writes=None),
    },
    weights=(*LLAMA.weights, *QK_NORM, *USUAL_RULES),
)

INDICES = Values(
    "a list of integers",
    lambda v: isinstance(v, list) and all(type(i) is int for i in v),
)


def _read_qwen3_moe(values: dict[str, Any]) -> dict[str, Any]:
    """Read both names of the number of experts; layers without experts must be the first ones."""
    dense = sorted(values["mlp_only_layers"] or [])
    if dense != list(range(len(dense))):
        raise unsupported(values, f"mlp_only_layers {dense} are not the first layers")
    experts = values.get("num_local_experts", values["num_experts"])
    return {**values, "num_experts": experts, "mlp_only_layers": len(dense)}


def _write_qwen3_moe(arch: Architecture) -> dict[str, Any]:
    assert arch.mixture is not None
    return {"mlp_only_layers": list(range(arch.mixture.dense_layers))}


# Qwen3 with a mixture of experts (Yang et al., 2025, arXiv 2505.09388).
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    window_keys=("use_sliding_window", "sliding_window"),
    keys={
        **LLAMA.keys,
        **LOSSES,
        # transformers refuses null here, unlike for most other families.
        "num_key_value_heads": Key(SIZE, "n_kv_heads", 4),
        "use_sliding_window": Key(only(False), default=False),
        "sliding_window": Key(optional(SIZE)),
        "max_window_layers": Key(SIZE),
        "num_experts": Key(SIZE, "mixture.experts", 128),
        "num_local_experts": Key(SIZE),  # transformers 5 writes this name, and reads both
        "num_experts_per_tok": Key(SIZE, "mixture.per_token", 8),
        "moe_intermediate_size": Key(SIZE, "mixture.ffn_dim", 768),
        "norm_topk_prob": Key(FLAG, "mixture.normalise", False),
        "decoder_sparse_step": Key(only(1), writes=1),
        "mlp_only_layers": Key(optional(INDICES), "mixture.dense_layers", None),
    },
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    weights=(*QWEN3.weights, *USUAL_RULES),
)


def _write_dots1(arch: Architecture) -> dict[str, Any]:
    assert arch.mixture is not None
    return {"n_shared_experts": arch.mixture.shared_dim // arch.mixture.ffn_dim}


# dots.llm1 (Huo et al., 2025, arXiv 2506.05767): Qwen3 with DeepSeek-V3's routing: sigmoid scores,
# a correction of the choice that follows the load, groups of experts, a shared expert, and ordinary
# MLPs in the first layers.
DOTS1 = replace(
    QWEN3,
    name="dots1",
    hf_class="Dots1ForCausalLM",
    routing={"scores": "sigmoid", "epsilon": 1e-20, "corrected": True},
    window_keys=("sliding_window", "layer_types"),
    keys={
        **LLAMA.keys,
        **LOSSES,
        "num_key_value_heads": Key(optional(SIZE), "n_kv_heads", 32),
        "sliding_window": Key(optional(SIZE), default=4096),
        "max_window_layers": Key(optional(COUNT), default=62),
        "layer_types": Key(optional(KINDS)),
        "n_routed_experts": Key(SIZE, "mixture.experts"),
        "n_shared_experts": Key(SIZE, "mixture.shared_dim"),
        "num_experts_per_tok": Key(SIZE, "mixture.per_token"),
        "moe_intermediate_size": Key(SIZE, "mixture.ffn_dim", 1408),
        "first_k_dense_replace": Key(COUNT, "mixture.dense_layers", 0),
        "n_group": Key(SIZE, "mixture.groups", 1),
        "topk_group": Key(SIZE, "mixture.groups_per_token", 1),
        "norm_topk_prob": Key(FLAG, "mixture.normalise", False),
        "routed_scaling_factor": Key(NUMBER, "mixture.scale", 1.0),
    },
    # The number of shared experts there, the width of one that computes them all here.
    read=lambda values: {
        **values,
        "n_shared_experts": values["n_shared_experts"] * values["moe_intermediate_size"],
    },
    write=_write_dots1,
    weights=(
        *QWEN3.weights,
        *USUAL_RULES,
        WeightRule(f"{LAYER}.mlp.gate.e_score_correction_bias", (f"{MLP}.router.balance",)),
        *renamed(
            {
                f"{LAYER}.mlp.shared_experts.{part}_proj": f"{MLP}.shared.{part}"
                for part in ("gate", "up", "down")
            }
        ),
    ),
)
