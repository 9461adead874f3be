"""Arguments of `dtt export` and `dtt eval` in a Slurm job: keys that differ from the job's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.resolved import Resolved
from dtt.config.run import RunConfig

EVAL_OPTIONS = {
    "eval.tasks": "--tasks",
    "eval.shots": "--shots",
    "eval.limit": "--limit",
    "eval.bos": "--bos",
    "eval.batch_tokens": "--batch-tokens",
}
"""Keys that `dtt eval` has an option for."""


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


def eval_options(values: Mapping[str, Any]) -> list[str]:
    """Return the options of `dtt eval` that set keys of the section `eval`."""
    options = []
    for key, value in values.items():
        if key == "eval.every":  # for training only
            continue
        if key not in EVAL_OPTIONS or value is None:
            raise ConfigError(
                f"{key}={explain.scalar(value)} is not an option of dtt eval",
                next=f"set it in the configuration of the job, or use {', '.join(EVAL_OPTIONS)}",
            )
        text = ",".join(value) if isinstance(value, list) else str(value)
        options += [EVAL_OPTIONS[key], text]
    return options
