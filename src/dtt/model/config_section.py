"""Conversion of an `Architecture` back to the `model` section of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtt.config.model import ONLY_FOR, ModelConfig
from dtt.model.architecture import Architecture, ExpertMixture

NOT_FROM_WEIGHTS = {"max_seq_len", "init_std", "dropout"}
"""Keys that do not depend on trained weights."""


def model_section(arch: Architecture) -> dict[str, Any]:
    """Return the `model` section from which the family builds `arch`.

    The keys in NOT_FROM_WEIGHTS are left out. Values are plain YAML types. Multipliers that differ
    from the family's own have no key here: the `scaling` section sets them.
    """
    section, named = _section(arch)
    dumped = section.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in dumped.items() if name in named}


def section_problems(arch: Architecture) -> Iterator[str]:
    """Yield a message for each inconsistent size of `arch`, by the rules of the `model` section."""
    for _, why in _section(arch)[0].problems():
        yield why


def _section(arch: Architecture) -> tuple[ModelConfig, set[str]]:
    """Return the configuration that builds `arch`, and the names of the keys it determines."""
    same = ModelConfig.model_fields.keys() & vars(arch).keys()
    values = {name: getattr(arch, name) for name in same - NOT_FROM_WEIGHTS}
    if arch.position == "learned":
        del values["rope_theta"], values["rope_scaling"]
    if arch.family not in ONLY_FOR["rope_local_theta"]:
        del values["rope_local_theta"]
    if arch.family not in ONLY_FOR["partial_rotary_factor"]:
        del values["partial_rotary_factor"]
    local = [window for window in arch.windows if window is not None]
    if local:
        values["window"] = local[0]
        if arch.family in ONLY_FOR["max_window_layers"]:
            values["max_window_layers"] = arch.windows.index(local[0])
    if arch.family in ONLY_FOR["window_pattern"]:
        # Layers 1 … n - 1 have the window and layer n none. Without a full layer, n exceeds the
        # depth, which gives the same windows.
        values["window_pattern"] = (*arch.windows, None).index(None) + 1
    if arch.family in ONLY_FOR["no_rope_layer_interval"]:
        values["no_rope_layer_interval"] = (*arch.rope_layers, False).index(False) + 1
    if arch.family == "gemma3":
        # config.json has an integer here; its inverse square root is the scale.
        values["query_pre_attn_scalar"] = round(arch.attn_scale**-2)
    if arch.mixture is not None:
        values |= _mixture(arch.mixture, arch.family)
    return ModelConfig(**values), set(values)


def _mixture(mixture: ExpertMixture, family: str) -> dict[str, Any]:
    """Return the keys of a mixture that the family has."""
    keys = {
        "n_experts": mixture.experts,
        "experts_per_token": mixture.per_token,
        "norm_topk": mixture.normalise,
        "expert_ffn_dim": mixture.ffn_dim,
        "n_dense_layers": mixture.dense_layers,
        "n_shared_experts": mixture.shared_dim // mixture.ffn_dim,
        "n_expert_groups": mixture.groups,
        "expert_groups_per_token": mixture.groups_per_token,
        "routed_scaling": mixture.scale,
    }
    return {key: value for key, value in keys.items() if family in ONLY_FOR[key]}
