"""Model families: architecture options, weight names and config.json as tables."""

from __future__ import annotations

from dtt.model.families import dense, mixtures
from dtt.model.families.base import DecoderFamily

_FAMILIES = {
    family.name: family
    for module in (dense, mixtures)
    for family in vars(module).values()
    if isinstance(family, DecoderFamily)
}
NAMES = tuple(_FAMILIES)
"""Values of `model.family` in the config."""


def get(name: str) -> DecoderFamily:
    """Return the family with that name (`model.family` in the config).

    Raises KeyError if there is none.
    """
    return _FAMILIES[name]


def every() -> tuple[DecoderFamily, ...]:
    """Return all families."""
    return tuple(_FAMILIES.values())
