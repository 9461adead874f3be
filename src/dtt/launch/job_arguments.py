"""Arguments of `dtt export` and `dtt eval` in a Slurm job: keys that differ from the job's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.config import explain
from dtt.config.resolved import Resolved
from dtt.config.run import RunConfig


def changed_keys(section: str, own: RunConfig, resolved: Resolved) -> dict[str, Any]:
    """Return the keys of a section that differ from the job's own configuration."""
    return {
        ".".join(key): explain.plain(entry.value)
        for key, entry in explain.describe_all(resolved.config)
        if key[0] == section and entry.value != explain.value_at(own, key)
    }


def pairs(values: Mapping[str, Any]) -> list[str]:
    """Return `key=value` arguments; text is taken as typed, without YAML's quotes."""
    return [
        f"{key}={value if isinstance(value, str) else explain.scalar(value)}"
        for key, value in values.items()
    ]
