"""The smallest configuration that still fails: the features that a failure takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtt.config.run import RunConfig
from dtt.config.source import shown
from dtt.config.validation import validate
from dtt.verify.layouts import Layout
from dtt.verify.shrink import Nested

Key = tuple[str, ...]

PLAIN: Mapping[str, Any] = {
    "optim": {"type": "adamw", "weight_decay": 0.0},
    "schedule": {"type": "constant"},
    "train": {"clip_norm": None},
}
"""Values of a run without features, where they are not the defaults."""
SECTIONS = (
    *("model", "scaling", "init", "adapter", "objective", "data", "chat", "optim", "schedule"),
    *("train", "parallel", "guard"),
)
"""Sections whose keys are features; in each, a type that is not plain is one feature."""


@dataclass(frozen=True)
class Minimal:
    """A failure, minimised."""

    values: Nested
    """The keys of the configuration that are not defaults."""
    layout: Layout
    features: tuple[str, ...]
    """Features that the failure takes besides the layout, as `key=value`."""


def minimise(cfg: RunConfig, layout: Layout, fails: Callable[[RunConfig, Layout], bool]) -> Minimal:
    """Return the smallest layout and configuration for which `fails` is still True."""
    for dim in layout.dims:
        smaller = layout.without(dim)
        if fails(cfg, smaller):  # also in one process, as an export may
            layout = smaller
    values = cfg.model_dump(mode="json")
    plain = _plain()
    features = [key for section in SECTIONS for key in _features(values, plain, (section,))]

    def fails_with(kept: Sequence[Key]) -> bool:
        reduced, _ = validate(type(cfg), _only(values, plain, kept))
        return reduced is not None and fails(reduced, layout)

    kept = [] if not features or fails_with(()) else _explain(fails_with, (), features)
    minimal = _only(values, plain, kept)
    minimal["parallel"] |= layout.section
    # The layout decides, not the number of processes that the user's job has.
    minimal["launch"] = {}
    changes = {
        section: minimal[section]
        for section, default in RunConfig().model_dump(mode="json").items()
        if minimal[section] != default
    }
    named = tuple(f"{'.'.join(key)}={_named(_value(values, key))}" for key in kept)
    return Minimal(changes, layout, named)


def _plain() -> Nested:
    """Return the values of a run without features."""
    values = RunConfig().model_dump(mode="json")
    for section, changes in PLAIN.items():
        same = values[section].get("type") == changes.get("type")
        other, _ = validate(RunConfig, {section: values[section] | changes if same else changes})
        assert other is not None
        values[section] = other.model_dump(mode="json")[section]
    return values


def _features(values: Nested, plain: Nested, key: Key) -> Iterator[Key]:
    """Yield the keys below `key` that are not plain; a section of another type as a whole."""
    value, other = _value(values, key), _value(plain, key)
    if key[0] == "parallel" and key[1:] not in ((), ("reduce",), ("reshard",)):
        return  # the layout
    if value == other:
        return
    sections = isinstance(value, dict) and isinstance(other, dict)
    if not sections or value.get("type") != other.get("type"):
        yield key
        return
    for name in value:
        yield from _features(values, plain, (*key, name))


def _only(values: Nested, plain: Nested, kept: Sequence[Key]) -> Nested:
    """Return the values with only some of the features."""
    found = copy.deepcopy(values)
    for section in SECTIONS:
        for key in list(_features(values, plain, (section,))):
            if key not in kept:
                _value(found, key[:-1])[key[-1]] = copy.deepcopy(_value(plain, key))
    return found


def _value(values: Nested, key: Key) -> Any:
    value: Any = values
    for name in key:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _named(value: Any) -> str:
    """Return a value in words; of a section its type."""
    return str(value.get("type", value)) if isinstance(value, dict) else shown(value)


def _explain(
    fails: Callable[[Sequence[Key]], bool],
    background: Sequence[Key],
    features: Sequence[Key],
    *,
    grown: bool = False,
) -> list[Key]:
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
