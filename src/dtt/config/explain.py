"""Descriptions of configuration keys: type, documentation, default and current value.

Implements `dtt config explain` and the YAML of `dtt config show`.
"""

from __future__ import annotations

import difflib
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo

from dtt.config.base import RESUMABLE, Length, Section, field_docs
from dtt.config.key_types import TAGS, Key, KeyTypes
from dtt.config.layers import Layer, parse_scalar, shown
from dtt.config.merging import Resolved, origin_of
from dtt.config.run import RunConfig

WIDTH = 100
LONGEST_KEY = 1000
"""Maximum length of a key of YAML before the `:` of its line, in characters."""
ELSEWHERE = {
    "batch_size": "train.global_batch_tokens",
    "per_device_train_batch_size": "train.micro_batch",
    "learning_rate": "optim.lr",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "max_length": "train.seq_len",
    "block_size": "train.seq_len",
    "gradient_checkpointing": "train.remat",
    "d_model": "model.dim",
    "hidden_size": "model.dim",
    "n_embd": "model.dim",
    "num_hidden_layers": "model.n_layers",
    "n_head": "model.n_heads",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.ffn_dim",
    "output_dir": "name",
}
"""Names that transformers and nanoGPT give to keys, for which a similar name would mislead."""
COMMON = ("train", "model", "optim")
"""Sections that a key without its section most probably belongs to."""
WORDS = {
    str: "text",
    Path: "path",
    int: "integer",
    float: "number",
    bool: "true | false",
    type(None): "null",
    Length: "integer | number | text",
}


def variants(field: FieldInfo) -> list[type[Section]]:
    """Return the Section classes of a field: none for a plain key, several for a tagged union."""
    return _sections_among(_members(field.annotation))


def items(field: FieldInfo) -> list[type[Section]]:
    """Return the Section classes of the entries of a list field; empty for any other field."""
    if typing.get_origin(field.annotation) is not tuple:
        return []
    entries = typing.get_args(field.annotation)
    return _sections_among([one for entry in entries for one in _members(entry)])


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union, also of a nested one; of another annotation, its only type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _members(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [member for argument in arguments for member in _members(argument)]
    return [annotation]


def _sections_among(members: Sequence[Any]) -> list[type[Section]]:
    return [one for one in members if isinstance(one, type) and issubclass(one, Section)]


def type_in_words(field: FieldInfo) -> str:
    """Return the type of a key, such as `integer | null`."""
    words = {tuple: "list", dict: "names and values"}
    found: list[str] = []
    for one in _members(field.annotation):
        if (origin := typing.get_origin(one)) is Literal:
            found += map(str, typing.get_args(one))
        else:
            found.append(words.get(origin) or WORDS.get(one) or one.__name__)
    return " | ".join(found)


def on_resume(field: FieldInfo) -> str:
    """Return what holds for a key when a job resumes."""
    return "may change" if field.json_schema_extra == RESUMABLE else "must stay"


def values(section: Section, key: Key = ()) -> Iterator[tuple[Key, Any, bool]]:
    """Yield every plain key of a resolved config, depth first: key, value, may it change."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from values(value, (*key, name))
        else:
            yield (*key, name), value, field.json_schema_extra == RESUMABLE
    # Those of a user's own class, where its code does not run.
    for name, value in (section.model_extra or {}).items():
        yield (*key, name), value, False


def changes(new: Section, old: Section) -> dict[Key, Any]:
    """Return the plain keys of `new` that have another value in `old`, or are not in it."""
    return {key: value for key, value, _ in values(new) if value != value_at(old, key)}


def value_at(section: Section, key: Key) -> Any:
    """Return the value at a key, or None if this config's variant has no such key."""
    value: Any = section
    for name in key:
        value = getattr(value, name, None)
    return value


def tagged(values: Any, key: Sequence[str]) -> tuple[str, str]:
    """Return the key `x.type` of the innermost tagged section that holds `key`, and its value.

    That of `model` is `model.family`.
    """
    found = "", ""
    for length, part in enumerate(key):
        if isinstance(values, dict) and (name := next((t for t in TAGS if t in values), None)):
            found = ".".join([*key[:length], name]), str(values[name])
        values = values[int(part)] if isinstance(values, list) else values.get(part)
    return found


def types_with(cls: type[Section], key: str, *, entries: bool) -> list[str]:
    """Return the tags of the variants that have the key `a.b.c` themselves."""
    fields = all_fields(cls, entries=entries)
    holders = [one for path, one, _ in fields if ".".join(path) == key]
    return [value for one in holders if tag_name(one) is not None for value in tags(one)]


def all_fields(
    cls: type[Section] = RunConfig, key: Key = (), *, entries: bool = False
) -> Iterator[tuple[Key, type[Section], str]]:
    """Yield every key of every variant: `(key, class that holds it, name in that class)`.

    With `entries`, the key of a list is followed by the keys of its entries.
    """
    for name, field in cls.model_fields.items():
        yield (*key, name), cls, name
        for variant in variants(field) or (items(field) if entries else []):
            yield from all_fields(variant, (*key, name), entries=entries)


@cache
def key_types(cls: type[Section] = RunConfig) -> KeyTypes:
    """Return what reading and merging need to know about the keys of `cls`.

    Text is a string, a path, or one of several words. A key that is text in one variant and, for
    example, a number in another is not among the texts.
    """
    found: dict[Key, set[Any]] = {}
    mappings: dict[Key, int | None] = {}
    tagged: dict[Key, dict[str, frozenset[str]]] = {}
    for key, holder, name in all_fields(cls, entries=True):
        field = holder.model_fields[name]
        annotation = field.annotation
        inner = typing.get_args(annotation)
        if levels := _mapping_levels(annotation):
            mappings[key] = None if levels == math.inf else int(levels)
        if len(classes := variants(field)) > 1:
            tagged[key] = {
                value: frozenset(one.model_fields) for one in classes for value in tags(one)
            }
        if typing.get_origin(annotation) is dict or (
            typing.get_origin(annotation) is tuple and inner[1:] == (...,)
        ):
            key, annotation = (*key, "*"), inner[0 if inner[1] is ... else 1]
        found.setdefault(key, set()).update(_scalar_types(annotation))
    other = {int, type(None)}
    texts = {
        key: frozenset({str} | types & other)
        for key, types in found.items()
        if types & {str, Path} and not types - {str, Path} - other
    }
    return KeyTypes(texts, mappings, tagged)


def _mapping_levels(annotation: Any) -> float:
    """Return how many mappings of free names a value of an annotation nests; 0 if it is none."""
    inner = [typing.get_args(m)[1] for m in _members(annotation) if typing.get_origin(m) is dict]
    return max((math.inf if v is Any else 1 + _mapping_levels(v) for v in inner), default=0)


def _scalar_types(annotation: Any) -> set[Any]:
    """Return the types that the values of an annotation have."""
    found: set[Any] = set()
    for one in _members(annotation):
        words = typing.get_args(one) if typing.get_origin(one) is Literal else ()
        found |= {type(word) for word in words} or {one}
    return found


@cache
def sections(cls: type[Section] = RunConfig) -> frozenset[Key]:
    """Return the keys that hold a section rather than a value."""
    fields = all_fields(cls)
    return frozenset(k for k, holder, name in fields if variants(holder.model_fields[name]))


def nearest(key: str, cls: type[Section] = RunConfig, *, entries: bool = False) -> str | None:
    """Return the known key most similar to a mistyped one; keys of the same section come first.

    With `entries`, keys of list entries are known too, without an index: `data.sources.path`.
    """
    known = sorted({".".join(k) for k, _, _ in all_fields(cls, entries=entries)})
    section, _, name = key.lower().rpartition(".")
    if ELSEWHERE.get(name) in known:
        return ELSEWHERE[name]
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    elsewhere: dict[str, str] = {}
    # optim.lr before optim.adamw.lr, train.steps before profile.steps
    for candidate in sorted(known, key=lambda k: (k.count("."), k.split(".")[0] not in COMMON)):
        elsewhere.setdefault(candidate.rpartition(".")[2], candidate)
    for names in (siblings, elsewhere):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.7)), None)


def scalar(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, float):
        return repr(value)
    text = _one_line(value)
    # PyYAML leaves the text "1e-3" unquoted, which parse_scalar reads as a number, and writes line
    # breaks as such. Both need double quotes.
    safe = "\n" not in text and parse_scalar(text) == value
    return text if safe else _one_line(value, default_style='"')


def _one_line(value: Any, **style: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, **style)
    return text.strip().removesuffix("\n...")


def show(resolved: Resolved) -> str:
    """Return the resolved config as YAML; each line ends with the origin of its value.

    Comments name the keys that another `type` of their section dropped.
    """
    values = resolved.config.model_dump(mode="json")
    lines: list[tuple[str, str]] = []

    def walk(inner: dict[str, Any], key: Key) -> None:
        indent = "  " * len(key)
        for name, value in inner.items():
            here = (*key, name)
            known = sections(type(resolved.config))
            written = name if not key or key in known else scalar(name)
            if len(written) > LONGEST_KEY:
                lines.append((f"{indent}? {written}", ""))
                written = ""
            if isinstance(value, dict) and value:
                lines.append((f"{indent}{written}:", ""))
                walk(value, here)
            else:
                origin = origin_of(resolved.layer, here)
                lines.append((f"{indent}{written}: {scalar(value)}", origin))
        lines.extend((f"{indent}# {line}", "") for line in dropped_lines(resolved, key))

    walk(values, ())
    width = min(48, max(len(text) for text, _ in lines))
    return "".join(
        f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def dropped_lines(resolved: Resolved, section: Key | None = None) -> list[str]:
    """Return a line for each key that another `type` of its section dropped, with its origin.

    With `section`, only for the keys of that section.
    """
    lines = []
    tagged = key_types(type(resolved.config)).variants
    for key, leaf in resolved.dropped.items():
        parent = next(key[:n] for n in range(len(key), -1, -1) if key[:n] in tagged)
        if section is None or parent == section:
            chosen = value_at(resolved.config, parent)
            name = str(tag_name(type(chosen)))
            lines.append(
                f"{'.'.join(map(scalar, key))} = {shown(leaf.value)} ({leaf.origin}) is not used: "
                f"{'.'.join(parent)}.{name}={getattr(chosen, name)} has no such key"
            )
    return lines


def show_stages(stages: Sequence[Resolved]) -> str:
    """Return the resolved stages of a configuration as YAML, which describes the same stages."""
    lines, name = [], ""
    for stage in stages:
        name, _, own = stage.config.name.rpartition("/")
        lines += [f"- name: {own}\n"]
        lines += [f"  {line}" for line in show(stage).splitlines(keepends=True)[1:]]
    return "".join([f"name: {name}\nstages:\n", *lines])


def explain(key: str, config: Section, layer: Layer) -> str | None:
    """Return the text that `dtt config explain KEY` prints; None if there is no such key.

    An empty key lists every section. A section lists its keys, for each type it can have. The key
    `x.type` refers to the section `x`.
    """
    path = tuple(key.removesuffix(".type").split(".")) if key else ()
    if not path:
        return "\n".join(_rows(RunConfig, ()))
    holders = [(cls, name) for k, cls, name in all_fields(type(config)) if k == path]
    if not holders:
        return None
    holder = value_at(config, path[:-1])
    cls, name = next((h for h in holders if isinstance(holder, h[0])), holders[0])
    field, value = cls.model_fields[name], value_at(config, path)
    lines = [".".join(path), *_wrapped("  ", field_docs(cls).get(name))]
    if not variants(field):
        used = isinstance(holder, cls)
        origin = layer[path].origin if path in layer else "default"
        now = f"{scalar(plain(value))}  ({origin})" if used else "not used with this type"
        lines += [
            f"  type     {type_in_words(field)}",
            f"  default  {scalar(plain(getattr(defaults(cls, path[:-1]), name)))}",
            f"  now      {now}",
            f"  resume   {on_resume(field)}",
        ]
    held = variants(field) or items(field)
    for variant in held:
        if len(held) > 1:
            chosen = "  (now)" if isinstance(value, variant) else ""
            named = f"{tag_name(variant)}: {', '.join(tags(variant))}"
            lines += ["", f"  {named}{chosen}", *_wrapped("  ", variant.__doc__)]
        lines += _rows(variant, path if variants(field) else ())
    return "\n".join(lines)


def _rows(cls: type[Section], key: Key) -> list[str]:
    """Return one line per key of a section, except its `type`: the key and its documentation."""
    keys = {name: ".".join((*key, name)) for name in cls.model_fields if name != "type"}
    width = max(map(len, keys.values()), default=0)
    return [
        line
        for name, dotted in keys.items()
        for line in _wrapped(f"  {dotted:<{width}}  ", field_docs(cls).get(name))
    ]


def _wrapped(start: str, text: str | None) -> list[str]:
    """Wrap `text` at WIDTH columns after `start`; further lines are indented by its length."""
    words, indent = " ".join((text or "").split()), " " * len(start)
    return textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=indent)


def tag_name(cls: type[Section]) -> str | None:
    """Return the name of the key that selects this class of a tagged union: `type` or `family`."""
    return next((name for name in TAGS if name in cls.model_fields), None)


def tags(cls: type[Section]) -> tuple[str, ...]:
    """Return the values of that key that select this class."""
    field = cls.model_fields[str(tag_name(cls))]
    return typing.get_args(field.annotation) or (str(field.default),)


def tag(cls: type[Section]) -> str:
    """Return the value of that key that selects this class, the first of several."""
    return tags(cls)[0]


def defaults(cls: type[Section], key: Key) -> Section:
    """Return the section `cls` at `key` with its defaults.

    The enclosing section may define its own defaults, such as `optim.adamw` in `MuonConfig`.
    """
    section = value_at(RunConfig(), key)
    # model_construct does not validate: some sections have keys without a default.
    return section if isinstance(section, cls) else cls.model_construct()


def plain(value: Any) -> Any:
    """Convert a value to types that YAML can represent."""
    if isinstance(value, tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Length):
        return value.written
    return value if isinstance(value, int | float | str | bool | dict | None) else str(value)
