"""Validation of plain values as a section, with a reason in words for each invalid one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dtt.config import explain
from dtt.config.base import Section, walk
from dtt.config.key_types import TAGS, Key
from dtt.config.layers import shown

Problem = tuple[Key, str]
"""A key and the reason why its value is invalid."""

SectionT = TypeVar("SectionT", bound=Section)


def validate(
    cls: type[SectionT], values: Mapping[str, Any]
) -> tuple[SectionT | None, list[Problem]]:
    """Validate nested plain values as a `cls`; return (section, []) or (None, all problems)."""
    try:
        # Validate as JSON: strict mode then accepts a list for a tuple and a string for a path.
        section = cls.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        return None, _describe_all(cls, values, error)
    # After pydantic, whose checks see one field at a time: these compare fields of a valid section.
    problems: list[Problem] = [
        ((*key, *name.split(".")), why)
        for key, inner in walk(section)
        for name, why in inner.problems()
    ]
    return (None if problems else section), problems


def _describe_all(cls: type[Section], values: Any, error: ValidationError) -> list[Problem]:
    """Convert pydantic's errors to problems, one for each key.

    For a union without tags, pydantic reports why the value fits none of its members.
    """
    whys: dict[Key, list[str]] = {}
    for details in error.errors():
        key, why = _describe(cls, values, _locate(values, details["loc"]), details)
        whys.setdefault(key, []).append(why)
    return [
        (key, " or ".join([*(why.partition(" (got ")[0] for why in others), last]))
        for key, (*others, last) in whys.items()
    ]


def _locate(values: Any, loc: Sequence[str | int]) -> Key:
    """Return the key of an error.

    `loc` also contains the tag of each tagged section and the name of a union's member.
    """
    key: list[str] = []
    inner, tag = values, True
    for i, part in enumerate(loc):
        # The tag comes before the key in its section, and may be the name of one: data.tokens.
        if isinstance(inner, dict) and tag and part in [inner.get(name) for name in TAGS]:
            tag = False
        elif isinstance(inner, dict) and (part in inner or i == len(loc) - 1):
            key.append(str(part))
            inner, tag = inner.get(part), True
        elif isinstance(part, int):
            key.append(str(part))
            inner = inner[part] if isinstance(inner, list) and part < len(inner) else None
    return tuple(key)


def _describe(cls: type[Section], values: Any, key: Key, error: ErrorDetails) -> Problem:
    """Return the key of a pydantic error, and the reason in words."""
    dotted, given = ".".join(key), error["input"]
    got = "" if isinstance(given, dict) else f" (got {shown(given)})"
    match error["type"]:
        case "extra_forbidden":
            general = ".".join(name for name in key if not name.isdigit())  # of any list entry
            close = explain.nearest(general, cls, entries=general != dotted)
            got = ""
            why = "unknown key" + (f"; did you mean {close}?" if close else "")
            if close == general:  # a key of another variant of this section
                name, tag = explain.tagged(values, key)
                others = explain.types_with(cls, general, entries=general != dotted)
                why = f"is for another {name} than {tag}"
                if others:
                    why = f"is for {name}={' or '.join(others)}, not {tag}"
        case "union_tag_invalid":
            key = (*key, error["ctx"]["discriminator"].strip("'"))
            got = f" (got {error['ctx']['tag']!r})"
            why = f"must be one of {error['ctx']['expected_tags']}"
        case "union_tag_not_found":
            name = error["ctx"]["discriminator"].strip("'")
            key, why, got = (*key, name), "is missing: it selects the variant", ""
        case "model_type" | "model_attributes_type" | "dict_type" if key in explain.sections(cls):
            why = f"is a section: set its keys, such as {dotted}.KEY=VALUE"
        case "model_type" | "model_attributes_type" | "dict_type":
            why = "must be names and values, such as {name: value}"
        case "tuple_type":
            why = "must be a list, such as [a, b]"
        case "too_long":
            why = f"takes at most {error['ctx']['max_length']} values"
        case "missing" if isinstance(given, list):
            why = "is missing: the list is too short"
        case _:
            why = error["msg"][0].lower() + error["msg"][1:]
    return key, why + got
