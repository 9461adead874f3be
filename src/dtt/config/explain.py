"""The knobs, described: what each means, takes and holds. Shows configs, answers `explain`."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo

from dtt.config.base import FREE_MARK, Section
from dtt.config.run import RunConfig
from dtt.config.source import Key, Layer

BAR = "\\|"  # a bar inside a cell of a Markdown table


@dataclass(frozen=True)
class Knob:
    """One key: its type in words, its documentation, its default or current value."""

    type: str
    doc: str
    value: Any
    free: bool
    """May change on resume."""


def variants(field: FieldInfo) -> list[type[Section]]:
    """The Section classes a field can hold: none for a plain knob, several for a tagged union."""
    return [c for c in _classes(field.annotation) if issubclass(c, Section)]


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [c for argument in typing.get_args(annotation) for c in _classes(argument)]
    return []


def _type_in_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is typing.Annotated:
        return _type_in_words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if a is type(None) else _type_in_words(a) for a in arguments)
    if origin is tuple:
        return "list"
    names = {"str": "text", "Path": "path", "int": "integer", "float": "number"}
    return str(names.get(annotation.__name__, annotation.__name__))


def describe(cls: type[Section], name: str, value: Any) -> Knob:
    """The knob `name` of a section class."""
    field = cls.model_fields[name]
    return Knob(
        type=_type_in_words(field.annotation),
        doc=" ".join((field.description or "").split()),
        value=value,
        free=field.json_schema_extra == FREE_MARK,
    )


def knobs(section: Section, key: Key = ()) -> Iterator[tuple[Key, Knob]]:
    """Every plain knob of a resolved config, depth first, with its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from knobs(value, (*key, name))
        else:
            yield (*key, name), describe(type(section), name, value)


def value_at(section: Section, key: Key) -> Any:
    """The value at a key, or None where this config's variant has no such key."""
    value: Any = section
    for name in key:
        value = getattr(value, name, None)
    return value


def type_of(values: Any, key: Sequence[str]) -> str:
    """The `type` of the tagged section at `key` of nested plain values."""
    for name in key:
        values = values[name]
    return str(values["type"])


def all_fields(
    cls: type[Section] = RunConfig, key: Key = ()
) -> Iterator[tuple[Key, type[Section], str]]:
    """Every key of every variant: `(key, class that holds it, name in that class)`."""
    for name, field in cls.model_fields.items():
        yield (*key, name), cls, name
        for variant in variants(field):
            yield from all_fields(variant, (*key, name))


@cache
def sections() -> frozenset[Key]:
    """Keys that hold a section rather than a value."""
    return frozenset(k for k, cls, name in all_fields() if variants(cls.model_fields[name]))


def nearest(key: str) -> str | None:
    """The known key most like a mistyped one; the same section is preferred."""
    known = sorted({".".join(k) for k, _, _ in all_fields()})
    section, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    elsewhere: dict[str, str] = {}
    for candidate in known:
        elsewhere.setdefault(candidate.rpartition(".")[2], candidate)
    for names in (siblings, elsewhere):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.7)), None)


def scalar(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, float):
        return repr(value)
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("\n...")
    )


def show(config: Section, layer: Layer) -> str:
    """The resolved config as YAML; each line ends with the origin of its value."""
    values = config.model_dump(mode="json")
    lines: list[tuple[str, str]] = []

    def walk(inner: dict[str, Any], key: Key) -> None:
        for name, value in inner.items():
            here, indent = (*key, name), "  " * len(key)
            if isinstance(value, dict):
                lines.append((f"{indent}{name}:", ""))
                walk(value, here)
            else:
                origin = layer[here].origin if here in layer else "default"
                lines.append((f"{indent}{name}: {scalar(value)}", origin))

    walk(values, ())
    width = min(48, max(len(text) for text, _ in lines))
    return "".join(
        f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def explain(key: str, config: Section, layer: Layer) -> str | None:
    """What `dtt config explain KEY` prints; None when there is no such key."""
    path = tuple(key.split(".")) if key else ()
    found = [(cls, name) for k, cls, name in all_fields() if k == path]
    if path and not found:
        return None
    below = [(k, cls, name) for k, cls, name in all_fields() if k[:-1] == path]
    lines = []
    for cls, name in found[:1]:
        knob = describe(cls, name, value_at(config, path))
        lines.append(key)
        lines.append(f"  {knob.doc}")
        if not below:
            origin = layer[path].origin if path in layer else "default"
            lines.append(f"  type     {knob.type}")
            lines.append(f"  default  {scalar(_default(cls, name))}")
            lines.append(f"  now      {scalar(_plain(knob.value))}  ({origin})")
            lines.append(f"  resume   {'may change' if knob.free else 'is fixed'}")
    for k, cls, name in below:
        variant = f"[{cls.model_fields['type'].default}] " if "type" in cls.model_fields else ""
        doc = " ".join((cls.model_fields[name].description or "").split())
        lines.append(f"  {'.'.join(k):<32} {variant}{doc}")
    return "\n".join(lines)


def _default(cls: type[Section], name: str) -> Any:
    return _plain(cls.model_fields[name].get_default(call_default_factory=True))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def reference() -> str:
    """The page docs/config.md: every key, with type, default and meaning."""
    out = ["# Configuration", "", "Made from the code by `python docs/generate.py`.", ""]
    out += _reference_section(RunConfig, (), "")
    return "\n".join(out) + "\n"


def _reference_section(cls: type[Section], key: Key, tag: str) -> list[str]:
    title = f"`{'.'.join(key)}`{tag}" if key else "Top level"
    out = [f"## {title}", "", " ".join((cls.__doc__ or "").split()), ""]
    out += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    deeper: list[tuple[Key, type[Section], str]] = []
    for name, field in cls.model_fields.items():
        held = variants(field)
        if held and not isinstance(field.default, tuple):
            deeper += [((*key, name), v, _tag(v, len(held))) for v in held]
            continue
        knob = describe(cls, name, None)
        cells = (f"`{name}`", knob.type, f"`{scalar(_default(cls, name))}`", knob.doc)
        out.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    out.append("")
    for inner_key, variant, inner_tag in deeper:
        out += _reference_section(variant, inner_key, inner_tag)
    return out


def _tag(cls: type[Section], count: int) -> str:
    return f" with `type: {cls.model_fields['type'].default}`" if count > 1 else ""
