"""The smallest configuration that still fails: the features that a failure takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtt.config.run import RunConfig
from dtt.config.source import shown
from dtt.config.validation import validate
from dtt.verify.layouts import Layout

PLAIN: Mapping[str, Any] = {
    "adapter": {"type": "none"},
    "objective": {"type": "next_token"},
    "data": {"type": "tokens"},
    "init": {},
    "scaling": {"type": "standard"},
    "schedule": {"type": "constant"},
    "optim": {"type": "adamw", "weight_decay": 0.0},
    "optim.groups": [],
    "optim.weight_decay": 0.0,
    "optim.normuon_beta2": None,
    "optim.momentum_warmup": 0,
    "optim.ns_coefficients": "classic",
    "optim.scale": "rms",
    "data.weights": [],
    "data.sources": [],
    "data.packing": "concat",
    "data.mask_documents": False,
    "data.eod_mask_loss": False,
    "train.ema_decay": None,
    "train.z_loss": 0.0,
    "train.clip_norm": None,
    "train.batch_schedule": {"type": "constant"},
    "train.context_schedule": [],
    "train.remat": "none",
    "parallel.reduce": "last",
    "parallel.reshard": True,
    "model": {"family": "llama"},
    "model.logit_softcap": None,
    "model.rope_scaling": {"type": "none"},
    "model.window": None,
    "model.n_kv_heads": None,
    "model.head_dim": None,
    "model.tie_embeddings": False,
}
"""Features by key, with the values of a run without them. Sections precede their keys."""


@dataclass(frozen=True)
class Minimal:
    """A failure, minimised."""

    cfg: RunConfig
    layout: Layout
    features: tuple[str, ...]
    """Features that the failure takes besides the layout, as `key=value`."""


def minimise(cfg: RunConfig, layout: Layout, fails: Callable[[RunConfig, Layout], bool]) -> Minimal:
    """Return the smallest layout and configuration for which `fails` is still True."""
    for dim in layout.dims:
        smaller = layout.without(dim)
        if smaller.dims and fails(cfg, smaller):
            layout = smaller
    features = [key for key, plain in PLAIN.items() if _value(cfg, key, plain) != plain]

    def fails_with(kept: Sequence[str]) -> bool:
        reduced = _only(cfg, kept)
        return reduced is not None and fails(reduced, layout)

    kept = [] if not features or fails_with(()) else _explain(fails_with, (), features)
    reduced = _only(cfg, kept)
    assert reduced is not None
    named = tuple(f"{key}={_named(cfg, key)}" for key in kept)
    return Minimal(reduced, layout, named)


def _explain(
    fails: Callable[[Sequence[str]], bool],
    background: Sequence[str],
    features: Sequence[str],
    *,
    grown: bool = False,
) -> list[str]:
    """Return a smallest part of `features` that, with the `background`, still fails.

    QuickXplain (Junker 2004): k of n features take about k log n runs, where switching them off
    one by one takes n. `grown` is True if the background has not been tried yet.
    """
    if grown and fails(background):
        return []
    if len(features) == 1:
        return list(features)
    half = len(features) // 2
    first, second = features[:half], features[half:]
    of_second = _explain(fails, [*background, *first], second, grown=True)
    of_first = _explain(fails, [*background, *of_second], first, grown=bool(of_second))
    return of_first + of_second


def _only(cfg: RunConfig, kept: Sequence[str]) -> RunConfig | None:
    """Return the configuration with only some features; None if they need others."""
    values = copy.deepcopy(cfg.model_dump(mode="json"))
    for key, plain in PLAIN.items():
        section, _, name = key.rpartition(".")
        holder = values[section] if section else values
        # A feature of a section that was replaced is gone with it.
        if key not in kept and name in holder and not (section in PLAIN and section not in kept):
            holder[name] = copy.deepcopy(plain)
    found, _ = validate(RunConfig, values)
    return found


def _value(cfg: RunConfig, key: str, plain: Any) -> Any:
    """Return the value of a key, as far as `plain` has it; `plain` if there is no such key."""
    value: Any = cfg.model_dump(mode="json")
    for name in key.split("."):
        if name not in value:
            return plain
        value = value[name]
    if isinstance(plain, dict) and isinstance(value, dict) and plain:
        return {name: value.get(name) for name in plain}
    return {} if key == "init" and value.get("from") is None else value


def _named(cfg: RunConfig, key: str) -> str:
    """Return the value of a feature; of a section its type or family."""
    value = _value(cfg, key, None)
    if isinstance(value, dict):
        return str(value.get("type") or value.get("family") or value.get("from"))
    return shown(value)


def as_keys(minimal: Minimal) -> dict[str, Any]:
    """Return the configuration as keys of a file, without those that have their defaults."""
    values = minimal.cfg.model_dump(mode="json")
    values["parallel"] |= minimal.layout.sizes._asdict()
    # The layout decides, not the number of processes that the user's job has.
    values["launch"] = RunConfig().launch.model_dump(mode="json")
    return _changes(values, RunConfig().model_dump(mode="json"))


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if not isinstance(value, dict):
            if value != default:
                kept[name] = value
            continue
        if value.get("type") != (default or {}).get("type"):
            kept[name] = value
        elif changes := _changes(value, default or {}):
            kept[name] = changes | ({"type": value["type"]} if "type" in value else {})
    return kept
