"""Merging of configuration layers, key by key; a new `type` keeps what its section still has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtt.config.key_types import TAGS, Key, Variants
from dtt.config.source import Layer


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
            _drop_below(merged, key)
            for parent in _parents(key):
                merged.pop(parent, None)
            merged[key] = leaf
    return merged, {key: leaf for key, leaf in dropped.items() if key not in merged}


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


def _parents(key: Key) -> Iterator[Key]:
    return (key[:length] for length in range(1, len(key)))


def _drop_below(layer: Layer, prefix: Key) -> None:
    for key in [key for key in layer if len(key) > len(prefix) and key[: len(prefix)] == prefix]:
        del layer[key]


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
