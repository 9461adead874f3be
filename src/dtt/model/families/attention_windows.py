"""Conversion of sliding windows between dtt and `layer_types` of config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtt.model.families.hf_config import unsupported

LOCAL, FULL = "sliding_attention", "full_attention"

Windows = tuple[int | None, ...]


def to_hf(windows: Windows) -> list[str]:
    """Return `layer_types`."""
    return [FULL if window is None else LOCAL for window in windows]


def from_hf(config: Mapping[str, Any], window: int | None, default: Sequence[str]) -> Windows:
    """Return the window of each layer; `default` are the types of a config.json that lists none.

    Raises InputError unless every layer has a type that dtt supports.
    """
    n_layers, kinds = len(default), config.get("layer_types") or default
    if len(kinds) != n_layers or not set(kinds) <= {LOCAL, FULL}:
        raise unsupported(
            config,
            f"config.json has layer_types: {kinds}; "
            f"supported: {LOCAL} or {FULL} for each of the {n_layers} layers",
        )
    if LOCAL in kinds and window is None:
        raise unsupported(
            config,
            f"config.json has layer_types: {kinds}, but the sliding_window is off (None)",
        )
    return tuple(window if kind == LOCAL else None for kind in kinds)


def every_nth(n_layers: int, interval: int) -> list[str]:
    """Return the types of layers of which every `interval`-th, counted from 1, has no window."""
    return [LOCAL if layer % interval else FULL for layer in range(1, n_layers + 1)]
