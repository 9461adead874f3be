"""Model families, one file each: architecture options, weight names, config.json conversion."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, get_args

from dtt.config.model import ModelConfig

if TYPE_CHECKING:
    from dtt.model.families.base import DecoderFamily

NAMES: tuple[str, ...] = get_args(ModelConfig.model_fields["family"].annotation)
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
