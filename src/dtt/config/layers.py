"""Sources of values: YAML and JSON files, the environment, `key=value` arguments.

Each source becomes a `Layer`, a mapping of dotted keys (as tuples) to values and their origins.
Layers are merged key by key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtt.base.errors import ConfigError, InputError
from dtt.base.reading import read_small
from dtt.config.key_types import STAGES, Key, KeyTypes

# Environment variables with the prefix DTT_ that are not configuration keys: they belong to the
# command line, env.sh, the tests and the test cluster.
SWITCHES = (
    "DTT_DEBUG",
    "DTT_QUIET",
    "DTT_PYTHON",
    "DTT_SHARED",
    "DTT_NO_SKIP",
    "DTT_WRITE_DOCS",
    "DTT_SLURM_",
    "DTT_SUPERVISED",
    "DTT_TRUST",
)


@dataclass(frozen=True)
class Leaf:
    """A value and its origin (`file:line`, `argument`, `default`, …)."""

    value: Any
    origin: str


Layer = dict[Key, Leaf]

SUFFIXES = (".yaml", ".yml", ".json")


def is_config(argument: str | Path) -> bool:
    """Return True if `argument` is a configuration file; it may have been meant for -c."""
    # Path.is_file raises OSError for text that is too long for a path.
    return Path(argument).suffix in SUFFIXES and os.path.isfile(argument)  # noqa: PTH113


NULLS = ("null", "Null", "NULL", "~")

TAG = "tag:yaml.org,2002:"
PLAIN = (f"{TAG}map", f"{TAG}seq")
"""Tags of mappings and lists without a tag of their own."""

LARGEST_NODE = 100_000
"""Maximum number of values in a file; ten lines of aliases can stand for billions."""


BAD_TEXT = (ValueError, AttributeError)
"""What PyYAML raises for text that its tag does not fit: `0x_`, an integer of 5,000 digits."""


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.1 as PyYAML reads it, except for numbers and dates.

    `3e-4` is a number, as `1_000` is. YAML 1.1 reads `12:00:00` in base 60, `2026-11-22` as a date
    and `010` as octal 8: they would not be written back as they were, so they stay text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  as PyYAML declares it
        first: [pair for pair in pairs if pair[0].removeprefix(TAG) in ("bool", "null", "merge")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        r"""Return a node; JSON escapes a character beyond 16 bits as two, such as \ud83d\ude00."""
        node = super().compose_scalar_node(anchor)
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            pairs = node.value.encode("utf-16", "surrogatepass")
            node.value = pairs.decode("utf-16", "surrogatepass")
        return node


_Loader.add_implicit_resolver(
    f"{TAG}int", re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    f"{TAG}float",
    re.compile(
        r"([-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?"
        r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def shown(value: Any) -> str:
    """Return a value as messages show it, cut to a line: text in quotes, the rest as in YAML."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def parse_scalar(text: str) -> Any:
    """Return the value of a line of YAML; an empty one is a string, as is what is not YAML."""
    if text == "":
        return ""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, *BAD_TEXT):
        return text


def _as_written(text: str, types: frozenset[type]) -> str | int | None:
    """Return the value of a key that holds text: `007`, `1e3` and `on` are themselves."""
    if type(None) in types and text in NULLS:
        return None
    return int(text) if int in types and re.fullmatch(r"0|-?[1-9]\d{0,17}", text) else text


class _Nodes:
    """The values of a YAML document, each with its origin."""

    def __init__(self, types: KeyTypes, origin: Callable[[yaml.Node], str]) -> None:
        self._types, self._origin = types, origin
        self._values = 0

    def _enter(self, node: yaml.Node) -> None:
        """Raise an error for a node with an unknown tag, and for one more than LARGEST_NODE."""
        self._values += 1
        if self._values > LARGEST_NODE:
            why = f"its aliases (*) repeat more than {LARGEST_NODE:,} values"
        elif node.tag.startswith("!") or (
            isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN
        ):
            # A tag such as !reset asks for something that plain values do not express.
            why = f"dtt does not know the tag {node.tag}"
        else:
            return
        raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)

    def add(self, node: yaml.Node, key: Key, layer: Layer) -> None:
        """Add the values of a node to a layer; the keys of mappings become parts of `key`."""
        self._enter(node)
        if isinstance(node, yaml.MappingNode) and (node.value or not key):
            for _, inner, value in self._pairs(node, key):
                self.add(value, inner, layer)
        elif key == STAGES and isinstance(node, yaml.SequenceNode):
            layer[key] = Leaf([*map(self._stage, node.value)], self._origin(node))
        else:
            _set(layer, key, Leaf(self._value(node, key), self._origin(node)))

    def _stage(self, node: yaml.Node) -> Layer:
        """Return the layer of an entry of `stages`; raise ConfigError if it is not a section."""
        if not isinstance(node, yaml.MappingNode):
            raise _no_stage(self._value(node, ()), self._origin(node))
        layer: Layer = {}
        self.add(node, (), layer)
        return layer

    def _pairs(self, node: yaml.MappingNode, key: Key) -> Iterator[tuple[str, Key, yaml.Node]]:
        """Yield each name of a mapping, which may be dotted, with its key and its value.

        Raises ConfigError for a name that appears twice: PyYAML silently takes the last.
        """
        seen: dict[str, str] = {}
        for name, value in node.value:
            where = self._origin(name)
            if not isinstance(name, yaml.ScalarNode):
                why = "a list or a mapping cannot be a key"
                raise ConfigError("a key is text", where=where, why=why)
            if name.tag == f"{TAG}merge":
                raise ConfigError(
                    "YAML merge keys (<<) are not supported",
                    where=where,
                    why="a value could not be traced to the line that sets it",
                    next="write these keys out, or move them to a separate file: extends: [FILE]",
                )
            # The text of the name, not what YAML makes of it: `on`, `1e3` and `007` are names.
            inner = self._types.below(key, name.value)
            if name.value in seen:
                raise _twice(inner, where, seen[name.value])
            seen[name.value] = where
            yield name.value, inner, value

    def _value(self, node: yaml.Node, key: Key) -> Any:
        """Return a plain value; unquoted values of keys that hold text are text as written."""
        self._enter(node)
        if isinstance(node, yaml.SequenceNode):
            inner = (*key, "*") if (*key, "*") in self._types.texts else key
            return [self._value(item, inner) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {name: self._value(value, k) for name, k, value in self._pairs(node, key)}
        assert isinstance(node, yaml.ScalarNode)
        kinds = self._types.text(key)
        if kinds is not None and node.style is None and node.value:
            return _as_written(node.value, kinds)
        try:
            return _Loader("").construct_object(node)
        except BAD_TEXT:
            return node.value


def _twice(key: Key, here: str, first: str) -> ConfigError:
    return ConfigError(
        f"{'.'.join(key)} appears twice",
        where=here,
        why=f"it is also set at {first}" if first != here else None,
    )


def read_file(path: Path, types: KeyTypes) -> Layer:
    """Read a config file; return its values with their lines.

    Values of keys that hold text are text as it is written. Raises ConfigError for a key that
    appears twice, nested or dotted.
    """
    try:
        text = read_small(path).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the config {path}", why=str(error)) from None

    if path.suffix == ".toml":  # some of it would be read as YAML
        raise ConfigError(f"{path} is TOML", next="write it as YAML or JSON, which dtt reads")
    if path.suffix == ".py":  # a sweep file could be Python
        raise ConfigError(f"{path} is Python", next="write it as YAML or JSON, or call dtt.train")

    def origin(node: yaml.Node) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    layer: Layer = {}
    try:
        if (node := yaml.compose(text, _Loader)) is not None:
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(
                    f"{path} does not contain `key: value` lines",
                    where=origin(node),
                    next="`dtt config show` prints one that does",
                )
            _Nodes(types, origin).add(node, (), layer)
            _check_stages(layer)
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply", next="use a file with `key: value` lines"
        ) from None
    except yaml.YAMLError as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        mark = getattr(error, "problem_mark", None)
        fix = "fix that line or the one above: indent with spaces, close quotes and brackets"
        if isinstance(error, yaml.reader.ReaderError):
            fix = "use a text file with `key: value` lines"
        elif path.suffix not in SUFFIXES:
            fix = "specify a configuration file; -d takes a dataset"
        raise ConfigError(
            f"{path} is not {kind}",
            where=f"{path}:{mark.line + 1}" if mark else None,
            why=getattr(error, "problem", None) or getattr(error, "reason", None) or str(error),
            next=fix,
        ) from None
    return layer


def _check_stages(layer: Layer) -> None:
    """Raise ConfigError if a file sets `stages.NAME.KEY` besides the KEY of that entry."""
    listed = layer.get(STAGES, Leaf([], "")).value
    for entry in listed if isinstance(listed, list) else ():
        stage = ("stages", str(entry.get(("name",), Leaf("", "")).value))
        for key, leaf in entry.items():
            if (*stage, *key) in layer:
                raise _twice((*stage, *key), layer[(*stage, *key)].origin, leaf.origin)


def _set(layer: Layer, key: Key, leaf: Leaf) -> None:
    """Add a value of a file; raise ConfigError if an earlier line sets its key, or one above it.

    A section whose value is null has lines that are all commented out, and sets nothing: it is left
    out if other lines set keys below it. Keys `stages.NAME.KEY` are not below the list `stages`.
    """
    for other, first in [*layer.items()]:
        short, long = sorted((key, other), key=len)
        if long[: len(short)] != short or (key != other and short == STAGES):
            continue
        if short == long or (leaf if short == key else first).value is not None:
            raise _twice(short, leaf.origin, first.origin)
        if short == key:
            return
        del layer[other]
    layer[key] = leaf


def _no_stage(value: Any, origin: str) -> ConfigError:
    return ConfigError(
        "an entry of stages is a section with a name",
        where=origin,
        why=f"got {shown(value)}",
        next="for example - {name: sft, train: {steps: 500}}",
    )


def _flatten(value: Any, key: Key, origin: str, layer: Layer) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(inner, (*key, str(name)), origin, layer)
    elif key == STAGES and isinstance(value, list):
        if others := [entry for entry in value if not isinstance(entry, Mapping)]:
            raise _no_stage(others[0], origin)
        layer[key] = Leaf([from_mapping(entry, origin) for entry in value], origin)
    else:
        layer[key] = Leaf(value, origin)


def from_mapping(values: Mapping[str, Any], origin: str) -> Layer:
    """Return a layer of nested plain values that all have the same origin."""
    layer: Layer = {}
    _flatten(values, (), origin, layer)
    return layer


def _said(key: Key, text: str, origin: str, types: KeyTypes) -> Layer:
    """Return the layer of a value that was typed.

    The text of a key that holds text is taken as typed, with its quotes. Other values are YAML, and
    a section such as `{type: wsd, decay: 5%}` is split into its keys. An argument has no comments,
    which YAML has: `5 # five` stays whole, and validation reports it.
    """
    kinds = types.text(key)
    if kinds is not None:
        return {key: Leaf(_as_written(text, kinds), origin)}
    try:
        node = yaml.compose(text, _Loader)
        if node is not None and not text[node.end_mark.index :].strip():
            layer: Layer = {}
            _Nodes(types, lambda _: origin).add(node, key, layer)
            return layer or {key: Leaf({}, origin)}
    except (yaml.YAMLError, RecursionError):
        pass
    return {key: Leaf(text, origin)}


def is_key(variable: str) -> bool:
    """Return True if an environment variable sets a key of the configuration."""
    return variable.startswith("DTT_") and not variable.startswith(SWITCHES)


def from_environment(env: Mapping[str, str], sections: Iterable[str], types: KeyTypes) -> Layer:
    """Return the layer of environment variables: `DTT_TRAIN__STEPS=5` sets `train.steps`.

    Values are taken as those of arguments. Raises ConfigError for a name with the prefix `DTT_`
    that is neither a key nor one of SWITCHES.
    """
    known = set(sections)
    layer: Layer = {}
    for name, text in env.items():
        if name.startswith("DTT_"):
            # Free names keep their case, as in DTT_LAUNCH__ENVIRONMENT__NCCL_DEBUG.
            key = types.split(name[4:].split("__"), joint="__", known=str.lower)
            if len(key) > 1 or key[0] in known:
                layer |= _said(key, text, f"environment {name}", types)
            elif not name.startswith(SWITCHES):
                raise ConfigError(
                    f"the environment variable {name} is not a configuration key of dtt",
                    why="sections and keys are joined by two underscores",
                    next="for example DTT_TRAIN__STEPS=500, or unset it",
                )
    return layer


def from_arguments(arguments: Iterable[str], types: KeyTypes) -> Layer:
    """Return the layer of `key.path=value` arguments; of several for a key, the last counts.

    Values of keys that hold text are text as it is typed.
    """
    layer: Layer = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if is_config(argument):
            raise ConfigError(f"{argument} is a configuration file", next=f"-c {argument}")
        key = types.split(name.split("."))
        free = types.depth(key) and all(key)
        if not equals or not (free or re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*\+?", name)):
            raise ConfigError(
                f"cannot understand the argument {argument!r}",
                why="arguments after the options have the form key.path=value",
                next="for example train.steps=500; `dtt config explain` lists the keys",
            )
        layer |= _said(key, text, "argument", types)
    return layer
