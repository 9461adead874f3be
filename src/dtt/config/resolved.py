"""A checked configuration, and where each of its values comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtt.config.key_types import Key
from dtt.config.run import RunConfig
from dtt.config.source import Layer


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and the merged layer it was built from."""

    config: RunConfig
    layer: Layer
    dropped: Layer = field(default_factory=dict)
    """Keys that were set for another `type` of their section, which has no such keys."""

    def origin(self, key: str) -> str:
        """Return the origin of the value of a dotted `key`: `file:line`, `argument`, `default`."""
        return origin_of(self.layer, tuple(key.split(".")))


def origin_of(layer: Layer, key: Key) -> str:
    """Return the origin of the value of `key`, or of the section around it; else `default`."""
    for length in range(len(key), 0, -1):
        if key[:length] in layer:
            return layer[key[:length]].origin
    below = [leaf.origin for k, leaf in layer.items() if k[: len(key)] == key]
    return next((origin for origin in below if origin != "default"), "default")
