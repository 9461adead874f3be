"""Keys of earlier versions: what replaces them, and how recorded configurations are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dtt.base.errors import ConfigError
from dtt.config.source import Key, Layer, Leaf, shown

CAUTIOUS: Key = ("optim", "cautious_weight_decay")
DECAY: Key = ("optim", "weight_decay")
GROUPS: Key = ("optim", "groups")


class RemovedKey(NamedTuple):
    """A key that no longer exists."""

    default: Any
    """Its default: with this value the key is ignored."""
    next: str
    """What to set instead."""
    convert: Callable[[Layer, Leaf], Mapping[Key, Any]] | None = None
    """A function that returns the keys that replace another value in the configuration of a job.
    None: there are none, and a job with such a value needs the version that it was made with."""


def _cautious(layer: Layer, _: Leaf) -> Mapping[Key, Any]:
    """Return the decays of Muon's matrices, in `optim` and in its groups, as cautious ones."""

    def cautious(decay: Any) -> Any:
        return decay if decay is None else f"cautious {decay}"

    changed: dict[Key, Any] = {DECAY: cautious(layer[DECAY].value)} if DECAY in layer else {}
    groups = layer[GROUPS].value if GROUPS in layer else []
    if groups:
        changed[GROUPS] = [
            {**entry, "weight_decay": cautious(entry.get("weight_decay"))}
            if entry.get("optimizer") != "adamw"
            else entry
            for entry in groups
        ]
    return changed


REMOVED: Mapping[Key, RemovedKey] = {
    CAUTIOUS: RemovedKey(False, "optim.weight_decay='cautious 0.1'", _cautious),
    ("optim", "ns_steps"): RemovedKey(
        5, "delete the key (Muon iterates five times), or optim.ns_coefficients=polar-express"
    ),
}


def without_removed(layers: Sequence[Layer], own: int) -> list[Layer]:
    """Return the layers without keys of earlier versions; the first `own` are defaults or a job's.

    A key that has its default is dropped. Another is converted in the configuration of a job, so
    that it resumes. In any other layer, and without a conversion, it is a ConfigError that names
    the replacement.
    """
    return [_replaced(layer, of_job=i < own) for i, layer in enumerate(layers)]


def _replaced(layer: Layer, *, of_job: bool) -> Layer:
    """Return one layer without such keys."""
    found = {key: leaf for key, leaf in layer.items() if key in REMOVED}
    if not found:
        return layer
    kept = {key: leaf for key, leaf in layer.items() if key not in found}
    for key, leaf in found.items():
        removed = REMOVED[key]
        if leaf.value == removed.default:
            continue
        if not of_job or removed.convert is None:
            raise ConfigError(
                f"{'.'.join(key)} no longer exists",
                where=leaf.origin,
                why=f"it is {shown(leaf.value)} here",
                next=removed.next,
            )
        changed = removed.convert(layer, leaf)
        kept |= {changed_key: Leaf(value, leaf.origin) for changed_key, value in changed.items()}
    return kept
