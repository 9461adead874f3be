"""Keys of earlier versions, which the recorded configurations of jobs still contain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.key_types import Key
from dtt.config.layers import Layer, Leaf, shown

REMOVED: Mapping[Key, tuple[Any, str]] = {
    ("optim", "cautious_weight_decay"): (
        False, "optim.weight_decay='{value: 0.1, cautious: true}'"
    ),
    ("optim", "ns_steps"): (5, "delete the key (Muon iterates five times)"),
    ("optim", "groups", "decay"): (None, "delete the key, or schedule.decay=60%"),
    ("optim", "ns_coefficients"): ("classic", "delete the key"),
    ("guard", "rewind_around"): (10, "delete the key, or guard.spike=skip"),
    ("guard", "spike_sigmas"): (6.0, "delete the key, or guard.spike=none"),
    ("guard", "max_skips"): (10, "delete the key, or guard.spike=none"),
    ("train", "finish_by"): (None, "delete the key, or train.budget=6h"),
    ("train", "remat_every"): (1, "delete the key, or train.remat=selective"),
    ("tokenize", "local"): (None, "delete the key, or tokenize.out=/shared/tokens"),
    ("checkpoint", "on_full"): ("stop", "delete the key, or checkpoint.keep_last=1"),
    ("launch", "template"): (None, "delete the key, or launch.setup='[source env.sh]'"),
    ("launch", "lead_seconds"): (None, "delete the key (it is measured), or launch.time=2:00:00"),
    ("train", "batch_schedule", "lr_rule"): ("none", "delete the key, or schedule.warmup=20%"),
    ("export", "out"): (None, "delete the key; dtt export JOB --out FOLDER, or name=ANOTHER"),
    ("launch", "nsys"): (False, "delete the key, or profile.kind=nsys"),
    ("launch", "nccl_logs"): (
        False, "delete the key, or launch.environment='{NCCL_DEBUG: INFO, NCCL_DEBUG_FILE: n-%h}'"
    ),
}  # fmt: skip
"""The default of each key, and what to set instead of another value."""
REMOVED_VALUES: Mapping[tuple[Key, str], str] = {
    (("launch", "continuation"), "singleton"): "launch.continuation=none",
    (("optim", "scale"), "hyperball"): "optim.scale=rms, with another optim.lr",
    (("train", "batch_schedule", "type"), "linear"):
        "train.batch_schedule='{type: list, stages: [[0, 65536]]}'",
}  # fmt: skip
"""What to set instead of a value of a key that stays."""


def without_removed(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers without keys of earlier versions; ConfigError for one that is set."""
    kept = []
    for layer in layers:
        for key, (default, instead) in REMOVED.items():
            for leaf in _set(layer, key):
                if leaf.value != default:
                    raise ConfigError(
                        f"{'.'.join(key)} no longer exists",
                        where=leaf.origin,
                        why=f"it is {shown(leaf.value)} here",
                        next=instead,
                    )
        for (key, value), instead in REMOVED_VALUES.items():
            if key in layer and layer[key].value == value:
                raise ConfigError(
                    f"{'.'.join(key)}={value} no longer exists",
                    where=layer[key].origin,
                    next=instead,
                )
        # A job records every key, so each of its resumes would fail on one that has its default.
        kept.append({k: _without(k, leaf) for k, leaf in layer.items() if k not in REMOVED})
    return kept


def _set(layer: Layer, key: Key) -> Iterator[Leaf]:
    """Yield what a layer sets for a key, which may be one of the entries of a list."""
    if key in layer:
        yield layer[key]
    if (listed := layer.get(key[:-1])) is not None and isinstance(listed.value, list):
        for entry in listed.value:
            if isinstance(entry, dict) and key[-1] in entry:
                yield Leaf(entry[key[-1]], listed.origin)


def _without(key: Key, leaf: Leaf) -> Leaf:
    """Return a value without removed keys of its entries, if it is a list."""
    names = {removed[-1] for removed in REMOVED if removed[:-1] == key}
    if not names or not isinstance(leaf.value, list):
        return leaf
    entries = [
        {name: value for name, value in entry.items() if name not in names}
        if isinstance(entry, dict)
        else entry
        for entry in leaf.value
    ]
    return replace(leaf, value=entries)
