"""Configurations in a report: keys that differ from their defaults, and between runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtt.config import explain
from dtt.config.base import Section
from dtt.config.run import RunConfig

NOT_COMPARED = ("name", "extends")
"""Keys that differ between any two runs."""


def flat(cfg: Section) -> dict[str, str]:
    """Return the value of every key as one line of YAML."""
    return {
        ".".join(key): explain.scalar(explain.plain(value)) for key, value, _ in explain.values(cfg)
    }


def changed_keys(cfg: RunConfig) -> list[list[str]]:
    """Return key and value wherever the configuration differs from the defaults."""
    return [
        [".".join(key), explain.scalar(explain.plain(value))]
        for key, value in explain.changes(cfg, RunConfig()).items()
    ]


def differences(configs: Sequence[RunConfig | None]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run."""
    all_values = [None if cfg is None else flat(cfg) for cfg in configs]
    known = [values for values in all_values if values is not None]
    keys = dict.fromkeys(key for values in known for key in values)
    return [
        {"key": key, "values": [None if v is None else v.get(key) for v in all_values]}
        for key in keys
        if key not in NOT_COMPARED and len({v.get(key) for v in known}) > 1
    ]
