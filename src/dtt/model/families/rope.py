"""The scaling of rotary embeddings in config.json, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.config.model import LinearRopeScaling, Llama3RopeScaling, NoRopeScaling, RopeScaling
from dtt.model.families.base import refuse_unless


def to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """`rope_scaling` of config.json; an entry of `rope_parameters` when the base is added."""
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


def from_hf(rope: Mapping[str, Any], model_type: str) -> RopeScaling:
    """The other way; InputError for a kind that `Decoder` does not compute."""
    kind = rope.get("rope_type") or rope.get("type") or "default"  # `type` before 2024
    asked = {"model_type": model_type, **rope, "rope_type": kind}
    refuse_unless(asked, "rope_type", "default", "linear", "llama3")
    refuse_unless(asked, "partial_rotary_factor", 1.0)
    if kind == "default":
        return NoRopeScaling()
    if kind == "linear":
        return LinearRopeScaling(factor=float(rope["factor"]))
    return Llama3RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_seq_len=rope["original_max_position_embeddings"],
    )
