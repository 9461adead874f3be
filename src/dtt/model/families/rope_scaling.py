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
from dtt.model.architecture import Architecture
from dtt.model.families.hf_config import (
    FLAG,
    FULL,
    LOCAL,
    NUMBER,
    NUMBERS,
    SIZE,
    SPREAD,
    Values,
    only,
    optional,
    unsupported,
)

LENGTH = "original_max_position_embeddings"
"""Key of `original_max_seq_len` in config.json; other fields have the same name there."""
SCALINGS: Mapping[str, tuple[type[RopeScaling], Mapping[str, Values]]] = {
    "default": (NoRopeScaling, {}),
    "linear": (LinearRopeScaling, {"factor": NUMBER}),
    "llama3": (
        Llama3RopeScaling,
        {"factor": NUMBER, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER, LENGTH: SIZE},
    ),
    "yarn": (YarnRopeScaling, {"factor": NUMBER, LENGTH: SIZE}),
    "longrope": (LongRopeScaling, {"short_factor": NUMBERS, "long_factor": NUMBERS, LENGTH: SIZE}),
}
"""The class of each `rope_type`, and the required entries of `rope_parameters`."""
USUAL = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` in most families."""
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


def entries(arch: Architecture) -> dict[str, Any]:
    """Return the entries of config.json for RoPE, for old and new versions of transformers."""
    scaling = arch.rope_scaling
    fields = scaling.model_dump(mode="json", exclude={"type"}, exclude_none=True)
    if "original_max_seq_len" in fields:
        fields[LENGTH] = fields.pop("original_max_seq_len")
    hf = {"rope_type": "default" if scaling.type == "none" else scaling.type, **fields}
    parameters: dict[str, Any] = hf | {"rope_theta": arch.rope_theta}
    if arch.rope_local_theta is not None:
        local = {"rope_type": "default", "rope_theta": arch.rope_local_theta}
        parameters = {FULL: parameters, LOCAL: local}
    return {
        "rope_theta": arch.rope_theta,
        "rope_scaling": None if scaling.type == "none" else hf,
        # transformers 5 reads `rope_parameters` and older versions the two keys above it; the file
        # serves both.
        "rope_parameters": parameters,
    }


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
    kind = str(kinds[0])
    made, needed = SCALINGS.get(kind, (NoRopeScaling, {}))
    known = {
        "rope_type": only(*types),
        "type": only(kinds[0]),
        "rope_theta": NUMBER,
        "partial_rotary_factor": only(1.0),
        **needed,
        **OPTIONAL.get(kind, {}),
    }
    missing = {key: None for key in needed if key not in entries}
    for key, value in {"rope_type": kinds[0], **entries, **missing}.items():
        allowed = known.get(key, only(None))
        if not allowed.accepts(value):
            raise unsupported(
                config,
                f"config.json has {key}: {value!r} in {place}; supported: {allowed.words}",
            )
    fields = {key: value for key, value in entries.items() if key in made.model_fields}
    if LENGTH in needed:
        fields["original_max_seq_len"] = entries[LENGTH]
    if kind == "yarn":
        fields["attention_factor"] = _yarn_attention_factor(entries)
    elif kind == "longrope":
        context = config["max_position_embeddings"]
        fields["attention_factor"] = _longrope_attention_factor(entries, context)
        fields |= {key: tuple(entries[key]) for key in ("short_factor", "long_factor")}
    fields.pop("type", None)
    scaling = made(**{key: value for key, value in fields.items() if value is not None})
    for key, why in scaling.problems():
        raise unsupported(config, f"config.json has {place}.{key}: it {why}")
    return scaling


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
