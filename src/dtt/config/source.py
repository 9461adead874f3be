"""Sources of values: YAML, JSON and TOML files, the environment, `key=value` arguments.

Each source becomes a `Layer`, a mapping of dotted keys (as tuples) to values and their origins.
Layers are merged key by key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtt.base.errors import ConfigError, InputError
from dtt.base.reading import read_small

Key = tuple[str, ...]

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
)


@dataclass(frozen=True)
class Leaf:
    """A value and its origin (`file:line`, `argument`, `default`, …)."""

    value: Any
    origin: str


Layer = dict[Key, Leaf]

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
STAGES: Key = ("stages",)
"""Key of the list of training stages. The value of its leaf is a list of layers, one per stage, so
that each key of a stage has its own origin."""


def is_config(argument: str | Path) -> bool:
    """Return True if `argument` is a configuration file; it may have been meant for -c."""
    return Path(argument).suffix in SUFFIXES and Path(argument).is_file()


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.1 as PyYAML reads it, except that `3e-4` is a number, as `1_000` is."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


# `12:00:00` is a time limit and stays text; YAML 1.1 would read it as a number in base 60.
for _digit in "0123456789":
    _Loader.yaml_implicit_resolvers[_digit].insert(
        0, ("tag:yaml.org,2002:str", re.compile(r"^\d+(:\d\d?)+$"))
    )


# YAML 1.1 reads `010` as octal 8. The user means 10 or a name, so it stays text, and validation
# reports the leading zero where a number is expected.
LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")
for _first in "-+0":
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", LEADING_ZERO))


def parse_scalar(text: str) -> Any:
    """Return the value of a `key=value` argument, parsed as YAML; an empty one is a string."""
    if text == "":
        return ""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError:
        return text


def read_file(path: Path) -> tuple[list[str], Layer]:
    """Read a config file; return its `extends` list and its values with their lines."""
    try:
        text = read_small(path).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the config {path}", why=str(error)) from None
    layer: Layer = {}
    try:
        if path.suffix == ".toml":
            _flatten(tomllib.loads(text), (), str(path), layer)
        else:
            node = yaml.compose(text, _Loader)
            if node is not None:
                _flatten_node(node, (), path, layer)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML", why=str(error), next=f"fix that line of {path}"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(
            f"{path} is not YAML",
            where=f"{path}:{line}",
            why=str(error.problem),
            next="fix that line or the one above: indent with spaces, close quotes and brackets",
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply", next="use a file with `key: value` lines"
        ) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{path} is not YAML", why=error.reason, next="use a text file with `key: value` lines"
        ) from None
    return take_extends(layer)


def take_extends(layer: Layer) -> tuple[list[str], Layer]:
    """Return the `extends` list of a layer, and the layer without it."""
    rest = dict(layer)
    leaf = rest.pop(("extends",), Leaf([], ""))
    names = [leaf.value] if isinstance(leaf.value, str) else leaf.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "extends must be a list of files or shipped configs",
            where=leaf.origin,
            why=f"got {leaf.value!r}",
            next="for example extends: [models/llama-tiny.yaml]",
        )
    return names, rest


def _flatten_node(node: yaml.Node, key: Key, path: Path, layer: Layer) -> None:
    origin = f"{path}:{node.start_mark.line + 1}"
    if key == STAGES and isinstance(node, yaml.SequenceNode):
        layer[key] = Leaf([_stage_of_node(entry, path) for entry in node.value], origin)
        return
    if not isinstance(node, yaml.MappingNode):
        if not key:
            raise ConfigError(
                f"{path} does not contain `key: value` lines",
                where=origin,
                next="`dtt config show` prints one that does",
            )
        constructor = _Loader("")
        layer[key] = Leaf(constructor.construct_object(node, deep=True), origin)
        return
    seen: set[str] = set()
    for name_node, value in node.value:
        name = str(name_node.value)
        if name_node.tag == "tag:yaml.org,2002:merge":
            raise ConfigError(
                "YAML merge keys (<<) are not supported",
                where=f"{path}:{name_node.start_mark.line + 1}",
                why="a value could not be traced to the line that sets it",
                next="write these keys out, or move them to a separate file: extends: [FILE]",
            )
        here = f"{path}:{name_node.start_mark.line + 1}"
        if name in seen:
            raise ConfigError(
                f"{'.'.join((*key, name))} appears twice",
                where=here,
                next="delete one of the two lines",
            )
        seen.add(name)
        _flatten_node(value, (*key, *name.split(".")), path, layer)


def _stage_of_node(node: yaml.Node, path: Path) -> Layer:
    """Return the layer of an entry of `stages`; raise ConfigError if it is not a section."""
    if not isinstance(node, yaml.MappingNode):
        raise _no_stage(node.value, f"{path}:{node.start_mark.line + 1}")
    layer: Layer = {}
    _flatten_node(node, (), path, layer)
    return layer


def _stage(value: Any, origin: str) -> Layer:
    """Return the layer of an entry of `stages`; raise ConfigError if it is not a section."""
    if not isinstance(value, Mapping):
        raise _no_stage(value, origin)
    return from_mapping(value, origin)


def _no_stage(value: Any, origin: str) -> ConfigError:
    return ConfigError(
        "an entry of stages is a section with a name",
        where=origin,
        why=f"got {value!r}",
        next="for example - {name: sft, train: {steps: 500}}",
    )


def _flatten(value: Any, key: Key, origin: str, layer: Layer) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(inner, (*key, str(name)), origin, layer)
    elif key == STAGES and isinstance(value, list):
        layer[key] = Leaf([_stage(entry, origin) for entry in value], origin)
    else:
        layer[key] = Leaf(value, origin)


def from_mapping(values: Mapping[str, Any], origin: str) -> Layer:
    """Return a layer of nested plain values that all have the same origin."""
    layer: Layer = {}
    _flatten(values, (), origin, layer)
    return layer


def _say(key: Key, text: str, origin: str, layer: Layer) -> None:
    """Add a value to `layer`; a section such as `{type: wsd, decay: 5%}` is split into its keys."""
    value = parse_scalar(text)
    if value == {}:
        layer[key] = Leaf(value, origin)
    else:
        _flatten(value, key, origin, layer)


def is_key(variable: str) -> bool:
    """Return True if an environment variable sets a key of the configuration."""
    return variable.startswith("DTT_") and not variable.startswith(SWITCHES)


def from_environment(env: Mapping[str, str], sections: Iterable[str]) -> Layer:
    """Return the layer of environment variables: `DTT_TRAIN__STEPS=5` sets `train.steps`.

    Raises ConfigError for a name with the prefix `DTT_` that is neither a key nor one of SWITCHES.
    """
    known = set(sections)
    layer: Layer = {}
    for name, text in env.items():
        if name.startswith("DTT_"):
            key = tuple(name[4:].lower().split("__"))
            if len(key) > 1 or key[0] in known:
                _say(key, text, f"environment {name}", layer)
            elif not name.startswith(SWITCHES):
                raise ConfigError(
                    f"the environment variable {name} is not a configuration key of dtt",
                    why="sections and keys are joined by two underscores",
                    next="for example DTT_TRAIN__STEPS=500, or unset it",
                )
    return layer


def from_arguments(arguments: Iterable[str]) -> Layer:
    """Return the layer of `key.path=value` arguments."""
    layer: Layer = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if is_config(argument):
            raise ConfigError(f"{argument} is a configuration file", next=f"-c {argument}")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", name):
            raise ConfigError(
                f"cannot understand the argument {argument!r}",
                why="arguments after the options have the form key.path=value",
                next="for example train.steps=500; `dtt config explain` lists the keys",
            )
        _say(tuple(name.split(".")), text, "argument", layer)
    return layer


def merge(layers: Iterable[Layer]) -> Layer:
    """Merge layers key by key; later layers override earlier ones.

    A new `type` of a tagged section discards the keys that lower layers set for the old type.
    """
    merged: Layer = {}
    for layer in layers:
        for key, leaf in layer.items():
            if key[-1] == "type" and key in merged and merged[key].value != leaf.value:
                _drop_below(merged, key[:-1])
        for key, leaf in layer.items():
            _drop_below(merged, key)
            for parent in _parents(key):
                merged.pop(parent, None)
            merged[key] = leaf
    return merged


def _parents(key: Key) -> Iterator[Key]:
    return (key[:length] for length in range(1, len(key)))


def _drop_below(layer: Layer, prefix: Key) -> None:
    for key in [key for key in layer if len(key) > len(prefix) and key[: len(prefix)] == prefix]:
        del layer[key]


def nested(layer: Layer) -> dict[str, Any]:
    """Return the values of a layer as nested dicts."""
    root: dict[str, Any] = {}
    for key, leaf in layer.items():
        inner = root
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = leaf.value
    return root
