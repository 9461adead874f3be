"""Types of configuration keys, as far as reading and merging the sources depends on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Key = tuple[str, ...]

STAGES: Key = ("stages",)
"""Key of the list of training stages. The value of its leaf is a list of layers, one per stage, so
that each key of a stage has its own origin."""


TAGS = "type", "family"
"""Names of the keys that choose among the variants of a section: `model` has a `family`."""


def tag_of(section: object) -> str:
    """Return the name of the variant of a section, or of the user's class, as it is configured."""
    return next((str(getattr(section, name)) for name in TAGS if hasattr(section, name)), "")


Variants = Mapping[Key, Mapping[str, frozenset[str]]]
"""The keys of tagged sections, with the names that each value of the tag has."""


@dataclass(frozen=True)
class KeyTypes:
    """The types of the keys of a configuration class."""

    texts: Mapping[Key, frozenset[type]]
    """The keys whose values are text, with all types that each value may have: `int` and `NoneType`
    besides text. An item of a list, and a value of a mapping, has the key of the list and `*`."""
    mappings: Mapping[Key, int | None]
    """The keys that hold a mapping of free names, with its depth: 2 for a mapping of mappings, None
    for one of any values. The names of the innermost mapping are taken whole, with their dots."""
    variants: Variants

    def text(self, key: Key) -> frozenset[type] | None:
        """Return the types of the text at `key`; None if its value is not text."""
        key = _without_stage(key)
        return self.texts.get(key) or self.texts.get((*key[:-1], "*"))

    def depth(self, key: Key) -> int | None:
        """Return the number of names of `key` below the free mapping it is in; None if in none."""
        key = _without_stage(key)
        lengths = (length for length in range(len(key) + 1) if key[:length] in self.mappings)
        return next((len(key) - length for length in lengths), None)

    def below(self, key: Key, name: str) -> Key:
        """Return the key of a `name` that a file has below `key`; it may be dotted."""
        if (depth := self.depth(key)) is None:
            return self.split(name.split("."), key)
        levels = self.mappings[_without_stage(key[: len(key) - depth])]
        splits = 0 if levels is None else max(levels - 1 - depth, 0)
        return (*key, *name.split(".", splits))

    def split(
        self,
        names: Sequence[str],
        start: Key = (),
        joint: str = ".",
        known: Callable[[str], str] = str,
    ) -> Key:
        """Return the key of names that `joint` separated; those of a free name are joined.

        `known` converts each name that is not free.
        """
        for length in range(1, len(names)):
            key = (*start, *map(known, names[:length]))
            if self.depth(key) == 0:
                free = joint.join(names[length:])
                levels = self.mappings[_without_stage(key)]
                return (*key, *free.split(joint, -1 if levels is None else levels - 1))
        return (*start, *map(known, names))

    def under(self, prefix: str) -> KeyTypes:
        """Return the same types for a configuration that is a section of another file."""

        def moved(types: Mapping[Key, Any]) -> dict[Key, Any]:
            return {(prefix, *key): value for key, value in types.items()}

        return replace(self, **{name: moved(types) for name, types in vars(self).items()})


def _without_stage(key: Key) -> Key:
    """Return `key` without the prefix `stages.NAME`."""
    return key[2:] if key[:1] == STAGES and len(key) > 2 else key
