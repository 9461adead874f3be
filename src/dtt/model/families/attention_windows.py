"""Conversion of sliding windows between dtt and config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtt.model.families.hf_config import unsupported

LOCAL, FULL = "sliding_attention", "full_attention"

Windows = tuple[int | None, ...]


def to_hf(windows: Windows, pattern: tuple[int, int] | None) -> dict[str, Any]:
    """Return all keys of windows; `pattern` is the family's default window, if it needs one."""
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": pattern[0] if pattern is not None and window is None else window,
        # Of versions of transformers that do not read layer_types.
        "max_window_layers": windows.index(window) if window else len(windows),
        "layer_types": [FULL if w is None else LOCAL for w in windows],
    }


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
