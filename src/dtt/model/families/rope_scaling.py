"""Conversion of RoPE scaling between dtt and config.json, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.config.model import LinearRopeScaling, Llama3RopeScaling, NoRopeScaling, RopeScaling
from dtt.model.families.hf_config import NUMBER, SIZE, Values, only, unsupported


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


SUPPORTED = ("default", "linear", "llama3")
ENTRIES: Mapping[str, Mapping[str, Values]] = {
    "default": {},
    "linear": {"factor": NUMBER},
    "llama3": {
        "factor": NUMBER,
        "low_freq_factor": NUMBER,
        "high_freq_factor": NUMBER,
        "original_max_position_embeddings": SIZE,
    },
}
"""Required entries of `rope_parameters` for each type of scaling."""


def from_hf(config: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling]:
    """Return the RoPE base and scaling that a config.json describes; `theta` is the default base.

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
        found[place] = (within or beside or theta, _scaling(config, place, entries))
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


def _scaling(config: Mapping[str, Any], place: str, entries: Mapping[str, Any]) -> RopeScaling:
    """Return the scaling that `entries` describe.

    Raises InputError for one that dtt does not support.
    """
    # The key was `type` before 2024; transformers 4 writes both.
    kinds = [entries[key] for key in ("rope_type", "type") if key in entries] or ["default"]
    needed = ENTRIES.get(str(kinds[0]), {})
    known = {
        "rope_type": only(*SUPPORTED),
        "type": only(kinds[0]),
        "rope_theta": NUMBER,
        "partial_rotary_factor": only(1.0),
        **needed,
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
        case _:
            return NoRopeScaling()
