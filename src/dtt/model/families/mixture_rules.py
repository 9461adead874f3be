"""Rules that the families with a mixture of experts share.

Hugging Face folders have three matrices of each expert; transformers joins them while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.families.base import WeightRule, same_name
from dtt.model.families.hf_config import NUMBER, unsupported, without_effect
from dtt.model.families.llama import LAYER

MLP = "layers.{i}.mlp"
LOSSES = {
    # Coefficients of losses that only training has.
    "router_aux_loss_coef": NUMBER,
    **without_effect("output_router_logits"),
}


def with_mixture(
    arch: Architecture, cfg: ModelConfig, family: str, *, norm_topk: bool = True, **how: Any
) -> Architecture:
    """Return `arch` with the experts of a configuration; `how` are fields of `ExpertMixture`."""
    given = cfg.norm_topk
    mixture = ExpertMixture(
        experts=cfg.n_experts,
        per_token=cfg.experts_per_token,
        ffn_dim=cfg.expert_ffn_dim or arch.ffn_dim,
        normalise=norm_topk if given is None else given,
        **how,
    )
    return replace(arch, family=family, mixture=mixture)


def check(config: Mapping[str, Any], mixture: ExpertMixture) -> None:
    """Raise InputError, with the keys of config.json, for numbers that contradict each other."""
    if mixture.experts % mixture.groups or mixture.groups_per_token > mixture.groups:
        many = f"{mixture.experts} experts, n_group {mixture.groups}"
        raise unsupported(config, f"{many} and topk_group {mixture.groups_per_token}")
    candidates = mixture.experts // mixture.groups * mixture.groups_per_token
    if mixture.per_token > candidates:
        what = f"num_experts_per_tok is {mixture.per_token}"
        raise unsupported(config, f"{what}, and only {candidates} experts can compute a token")


def expert_rules(hf_mlp: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules of router and experts; `gate`, `up` and `down` are names of matrices."""
    names = {"gate": gate, "up": up, "down": down}
    return (
        *same_name(f"{LAYER}.{hf_mlp}.gate", f"{MLP}.router", "weight"),
        *(
            WeightRule(f"{LAYER}.{hf_mlp}.experts.{{e}}.{hf}.weight", (f"{MLP}.experts.{ours}",))
            for ours, hf in names.items()
        ),
    )


USUAL_RULES = expert_rules("mlp", "gate_proj", "up_proj", "down_proj")
