"""Model families, one file each: architecture options, weight names, config.json conversion."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtt.model.families.base import DecoderFamily

NAMES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "smollm3", "olmo2", "olmo3",
    "mixtral", "qwen3_moe", "olmoe", "dots1",
)  # fmt: skip
"""Each is `model.family` in the config, the module that defines the family, and its constant."""


def get(name: str) -> DecoderFamily:
    """Return the family with that name (`model.family` in the config).

    Raises KeyError if there is none.
    """
    if name not in NAMES:
        raise KeyError(name)
    # Imported by name: a run needs one of the fourteen, and a login node should start fast.
    family: DecoderFamily = getattr(import_module(f"{__name__}.{name}"), name.upper())
    return family


def every() -> tuple[DecoderFamily, ...]:
    """Return all families."""
    return tuple(map(get, NAMES))
