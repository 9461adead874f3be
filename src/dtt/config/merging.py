"""Merging of configuration layers, key by key, and what comes of it: a checked configuration.

A new `type` keeps what its section still has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.key_types import TAGS, Key, Variants
from dtt.config.layers import Layer, Leaf, shown
from dtt.config.run import RunConfig

STEPS: Key = ("train", "steps")
EPOCHS: Key = ("train", "epochs")


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and the merged layer it was built from."""

    config: RunConfig
    layer: Layer
    dropped: Layer = field(default_factory=dict)
    """Keys that were set for another `type` of their section, which has no such keys."""

    def origin(self, key: str) -> str:
        """Return the origin of the value of a dotted `key`: `file:line`, `argument`, `default`."""
        return origin_of(self.layer, tuple(key.split(".")))


def origin_of(layer: Layer, key: Key) -> str:
    """Return the origin of the value of `key`, or of the section around it; else `default`."""
    for length in range(len(key), 0, -1):
        if key[:length] in layer:
            return layer[key[:length]].origin
    below = [leaf.origin for k, leaf in layer.items() if k[: len(key)] == key]
    return next((origin for origin in below if origin != "default"), "default")


def take_extends(layer: Layer) -> tuple[list[str], Layer]:
    """Return the `extends` list of a layer, and the layer without it."""
    rest = dict(layer)
    leaf = rest.pop(("extends",), Leaf([], ""))
    names = [leaf.value] if isinstance(leaf.value, str) else leaf.value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "extends must be a list of files or shipped configs",
            where=leaf.origin,
            why=f"got {shown(leaf.value)}",
            next="for example extends: [models/llama-tiny.yaml]",
        )
    return names, rest


def merge(layers: Iterable[Layer], variants: Variants | None = None) -> tuple[Layer, Layer]:
    """Merge layers key by key, of which later ones override earlier ones; return what they dropped.

    If a layer gives a section of `variants` another `type`, the keys that lower layers set stay if
    this type has them, too. The second layer holds all others, except defaults.
    """
    merged: Layer = {}
    dropped: Layer = {}
    for layer in layers:
        for key, leaf in layer.items():
            section = key[:-1]
            changed = key[-1] in TAGS and key in merged and merged[key].value != leaf.value
            if changed and (fields := (variants or {}).get(section)) is not None:
                _change_type(section, fields, str(leaf.value), merged, dropped)
        for key, leaf in layer.items():
            for other in [k for k in merged if k != key and overlap(k, key)]:
                del merged[other]
            merged[key] = leaf
    return merged, {key: leaf for key, leaf in dropped.items() if key not in merged}


def overlap(one: Key, other: Key) -> bool:
    """Return True if one of two keys is the other, or a section that holds it."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _change_type(
    section: Key, fields: Mapping[str, frozenset[str]], tag: str, merged: Layer, dropped: Layer
) -> None:
    """Move keys of a section that the type `tag` lacks to `dropped`, and back those that it has.

    A key that no type has stays, as do all if there is no such type: validation reports them.
    """
    known = frozenset[str]().union(*fields.values())
    for key, leaf in [*dropped.items(), *merged.items()]:
        if len(key) > len(section) and key[: len(section)] == section:
            merged.pop(key, None)
            dropped.pop(key, None)
            if leaf.origin != "default":  # the new type has its own defaults
                name = key[len(section)]
                fits = name in fields.get(tag, known) or name not in known
                (merged if fits else dropped)[key] = leaf


def nested(layer: Layer) -> dict[str, Any]:
    """Return the values of a layer as nested dicts; keys below a list, `stages`, replace it."""
    root: dict[str, Any] = {}
    for key, leaf in layer.items():
        inner = root
        for name in key[:-1]:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[key[-1]] = leaf.value
    return root


def with_both_lengths(keys: Sequence[str]) -> set[str]:
    """Return `keys`, with both `train.steps` and `train.epochs` if one is among them.

    A change of either is a change of the other, which it resets.
    """
    lengths = {".".join(STEPS), ".".join(EPOCHS)}
    return {*keys, *(lengths if lengths & set(keys) else ())}


def length_layer(layers: Sequence[Layer]) -> Layer:
    """Return the layer that makes `train.steps` and `train.epochs` are mutually exclusive.

    The one that the highest layer sets counts, and the other is reset. A layer that sets both is
    left as it is: a job records both, and `open_dataset` checks that they agree.
    """
    if all(layer.get(EPOCHS, Leaf(None, "")).value is None for layer in layers):
        return {}
    steps: Leaf | None = None
    epochs: Leaf | None = None
    for layer in layers:
        given_steps, given_epochs = layer.get(STEPS), layer.get(EPOCHS)
        if given_epochs is not None and given_epochs.value is not None:
            if given_steps is not None:
                steps = given_steps
            elif epochs is None or epochs.value != given_epochs.value:
                steps = Leaf(0, given_epochs.origin)  # not known before the data is open
            epochs = given_epochs
        elif given_steps is not None:
            steps, epochs = given_steps, Leaf(None, given_steps.origin)
        elif given_epochs is not None:
            epochs = given_epochs
    return {key: leaf for key, leaf in ((STEPS, steps), (EPOCHS, epochs)) if leaf is not None}
