"""Keys of earlier versions, which the recorded configurations of jobs still contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.key_types import Key
from dtt.config.source import Layer, shown

REMOVED: Mapping[Key, tuple[Any, str]] = {
    ("optim", "cautious_weight_decay"): (
        False, "optim.weight_decay='{value: 0.1, cautious: true}'"
    ),
    ("optim", "ns_steps"): (
        5, "delete the key (Muon iterates five times), or optim.ns_coefficients=polar-express"
    ),
    ("guard", "rewind_around"): (10, "delete the key, or guard.spike=skip"),
    ("train", "finish_by"): (None, "delete the key, or train.budget=6h"),
    ("train", "remat_every"): (1, "delete the key, or train.remat=selective"),
    ("launch", "lead_seconds"): (None, "delete the key (it is measured), or launch.time=2:00:00"),
    ("launch", "nccl_logs"): (
        False, "delete the key, or launch.environment='{NCCL_DEBUG: INFO, NCCL_DEBUG_FILE: n-%h}'"
    ),
}  # fmt: skip
"""The default of each key, and what to set instead of another value."""


def without_removed(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers without keys of earlier versions; ConfigError for one that is set."""
    kept = []
    for layer in layers:
        for key, (default, instead) in REMOVED.items():
            if key in layer and layer[key].value != default:
                raise ConfigError(
                    f"{'.'.join(key)} no longer exists",
                    where=layer[key].origin,
                    why=f"it is {shown(layer[key].value)} here",
                    next=instead,
                )
        # A job records every key, so each of its resumes would fail on one that has its default.
        kept.append({key: leaf for key, leaf in layer.items() if key not in REMOVED})
    return kept
