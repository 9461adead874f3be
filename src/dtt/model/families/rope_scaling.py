"""Conversion of RoPE scaling between dtt and config.json, in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dtt.config.model import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from dtt.model.families.attention_windows import FULL, LOCAL
from dtt.model.families.hf_config import (
    FLAG,
    NUMBER,
    NUMBERS,
    SIZE,
    SPREAD,
    Values,
    only,
    optional,
    unsupported,
)


def to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """Return `rope_scaling` of config.json; with `rope_theta` added, it is `rope_parameters`."""
    match scaling:
        case NoRopeScaling():
            return {"rope_type": "default"}
        case LinearRopeScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3RopeScaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        case YarnRopeScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            } | (
                {}
                if scaling.attention_factor is None
                else {"attention_factor": scaling.attention_factor}
            )
        case LongRopeScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factor),
                "long_factor": list(scaling.long_factor),
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "attention_factor": scaling.attention_factor,
            }


USUAL = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` in most families."""
ENTRIES: Mapping[str, Mapping[str, Values]] = {
    "default": {},
    "linear": {"factor": NUMBER},
    "llama3": {
        "factor": NUMBER,
        "low_freq_factor": NUMBER,
        "high_freq_factor": NUMBER,
        "original_max_position_embeddings": SIZE,
    },
    "yarn": {"factor": NUMBER, "original_max_position_embeddings": SIZE},
    "longrope": {
        "short_factor": NUMBERS,
        "long_factor": NUMBERS,
        "original_max_position_embeddings": SIZE,
    },
}
"""Required entries of `rope_parameters` for each type of scaling."""
UNUSED = (("rope_type", "default"), ("rope_theta", None))
"""Entries of Gemma 3's rope_parameters that say nothing."""
OPTIONAL: Mapping[str, Mapping[str, Values]] = {
    "yarn": {
        "beta_fast": optional(NUMBER),
        "beta_slow": optional(NUMBER),
        "truncate": FLAG,
        "attention_factor": optional(NUMBER),
        "mscale": optional(SPREAD),
        "mscale_all_dim": optional(SPREAD),
    },
    "longrope": {"factor": optional(NUMBER), "attention_factor": optional(NUMBER)},
}
"""Entries that may be left out."""


def from_hf(
    config: Mapping[str, Any], theta: float, types: Sequence[str] = USUAL
) -> tuple[float, RopeScaling]:
    """Return the RoPE base and scaling that a config.json describes; `theta` is the default base.

    `types` are the values of `rope_type` that the family has.

    They may be in `rope_parameters` (transformers 5), in `rope_scaling` with `rope_theta` next to
    it (older versions), or in both. Versions of transformers differ in which they prefer, so
    contradicting values raise InputError.
    """
    found = {}
    for place in ("rope_parameters", "rope_scaling"):
        entries = config.get(place) or {}
        if not entries:
            continue
        beside, within = config.get("rope_theta"), entries.get("rope_theta")
        if beside is not None and within is not None and beside != within:
            raise unsupported(
                config,
                f"config.json has rope_theta: {beside!r} and {place}.rope_theta: {within!r}",
                next="remove the one that is wrong",
            )
        found[place] = (within or beside or theta, _scaling(config, place, entries, types))
    # Compared after parsing: the two places may spell the same scaling differently.
    if len(set(found.values())) > 1:
        raise unsupported(
            config,
            f"config.json has a rope_scaling ({config['rope_scaling']}) that contradicts its "
            f"rope_parameters ({config['rope_parameters']})",
            next="remove the one that is wrong",
        )
    base, scaling = next(iter(found.values()), (config.get("rope_theta") or theta, NoRopeScaling()))
    return float(base), scaling


def by_layer_type(
    config: Mapping[str, Any], local_base: float | None, default: float
) -> tuple[dict[str, Any], float]:
    """Return config.json with RoPE as in layers of full attention, and the base of the others.

    `local_base` is the base that an older config.json has for layers with a window, and `default`
    that of a file without one. Raises InputError if these layers have a scaling.
    """
    ropes = config.get("rope_parameters") or {}
    if ropes.keys() & {LOCAL, FULL}:  # beside them, transformers 5.14 writes what it never reads
        ropes = {key: value for key, value in ropes.items() if (key, value) not in UNUSED}
    if not ropes.keys() <= {LOCAL, FULL} or not all(isinstance(r, dict) for r in ropes.values()):
        raise unsupported(
            config,
            f"config.json has rope_parameters: {ropes}; "
            f"supported: an object for {LOCAL}, one for {FULL}, or both",
        )
    inner = {"rope_parameters": ropes.get(LOCAL), "rope_scaling": None, "rope_theta": local_base}
    base, scaling = from_hf({**config, **inner}, default)
    if scaling != NoRopeScaling():
        raise unsupported(
            config,
            f"config.json has {ropes[LOCAL]} in rope_parameters.{LOCAL}; "
            "supported: rope_type 'default'",
        )
    full = ropes.get(FULL)
    if (full or config.get("rope_scaling") or {}).get("truncate") is False:
        # transformers 5 looks for it beside the types of layers, and so never finds it.
        raise unsupported(config, f"config.json has truncate: False in the RoPE of {FULL}")
    return {**config, "rope_parameters": full}, base


def _scaling(
    config: Mapping[str, Any], place: str, entries: Mapping[str, Any], types: Sequence[str]
) -> RopeScaling:
    """Return the scaling that `entries` describe.

    Raises InputError for one that dtt does not support.
    """
    # The key was `type` before 2024; transformers 4 writes both.
    kinds = [entries[key] for key in ("rope_type", "type") if key in entries] or ["default"]
    needed = ENTRIES.get(str(kinds[0]), {})
    known = {
        "rope_type": only(*types),
        "type": only(kinds[0]),
        "rope_theta": NUMBER,
        "partial_rotary_factor": only(1.0),
        **needed,
        **OPTIONAL.get(str(kinds[0]), {}),
    }
    missing = {key: None for key in needed if key not in entries}
    for key, value in {"rope_type": kinds[0], **entries, **missing}.items():
        allowed = known.get(key, only(None))
        if not allowed.accepts(value):
            raise unsupported(
                config,
                f"config.json has {key}: {value!r} in {place}; supported: {allowed.words}",
            )
    match kinds[0]:
        case "linear":
            return LinearRopeScaling(factor=float(entries["factor"]))
        case "llama3":
            scaling = Llama3RopeScaling(
                factor=float(entries["factor"]),
                low_freq_factor=float(entries["low_freq_factor"]),
                high_freq_factor=float(entries["high_freq_factor"]),
                original_max_seq_len=entries["original_max_position_embeddings"],
            )
            for key, why in scaling.problems():
                raise unsupported(config, f"config.json has {place}.{key}: it {why}")
            return scaling
        case "yarn":
            return YarnRopeScaling(
                factor=float(entries["factor"]),
                original_max_seq_len=entries["original_max_position_embeddings"],
                beta_fast=float(entries.get("beta_fast") or 32),
                beta_slow=float(entries.get("beta_slow") or 1),
                truncate=entries.get("truncate", True),
                attention_factor=_yarn_attention_factor(entries),
            )
        case "longrope":
            return LongRopeScaling(
                short_factor=tuple(map(float, entries["short_factor"])),
                long_factor=tuple(map(float, entries["long_factor"])),
                original_max_seq_len=entries["original_max_position_embeddings"],
                attention_factor=_longrope_attention_factor(
                    entries, config["max_position_embeddings"]
                ),
            )
        case _:
            return NoRopeScaling()


def _yarn_attention_factor(entries: Mapping[str, Any]) -> float | None:
    """Return the attention factor that `entries` set, or None for YaRN's own."""
    if (given := entries.get("attention_factor")) is not None:
        return float(given)
    # Those of DeepSeek's models: the ratio of two factors of the same form. 0 counts as left out.
    over, under = entries.get("mscale"), entries.get("mscale_all_dim")
    if not over or not under:
        return None
    stretch = 0.1 * math.log(max(1.0, entries["factor"]))
    return float((stretch * over + 1.0) / (stretch * under + 1.0))


def _longrope_attention_factor(entries: Mapping[str, Any], context: int) -> float:
    """Return the attention factor that `entries` set, or that of the paper (section 3.2)."""
    if (given := entries.get("attention_factor")) is not None:
        return float(given)
    original = entries["original_max_position_embeddings"]
    factor = entries.get("factor") or context / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
