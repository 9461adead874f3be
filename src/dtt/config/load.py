"""Layers in, one checked `RunConfig` out, with the origin of every value.

Low to high: defaults, the job's own config (on resume), `extends` left to right, the file,
the environment, `key=value` arguments, named options.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dtt.config import explain, source
from dtt.config.base import Section
from dtt.config.init import HF, MAY_DIFFER
from dtt.config.run import RunConfig
from dtt.config.source import Key, Layer
from dtt.errors import ConfigError, InputError
from dtt.secrets import holds_secret, named_secret

Problem = tuple[Key, str]
"""A key and why its value cannot be."""

ModelOf = Callable[[str], Mapping[str, Any]]
"""The `model` section of released weights, from the value of `init.from`."""

INIT_FROM: Key = ("init", "from")

SectionT = TypeVar("SectionT", bound=Section)


class Mistakes(ConfigError):
    """Every problem of a configuration at once, each with its file and line."""

    def __init__(self, problems: Sequence[Problem], layer: Layer, of: str, *, next: str) -> None:
        """`of` names what was read; `layer` says where each value was said."""
        self.problems = tuple(problems)
        count = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''} in {of}"
        lines = [f"  {_origin(layer, key)}  {'.'.join(key)}: {why}" for key, why in problems]
        super().__init__("\n".join([count, *lines]), next=next)


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and the layer it came from."""

    config: RunConfig
    layer: Layer

    def origin(self, key: str) -> str:
        """Where the value of a dotted `key` was said: `file:line`, `argument`, `default`."""
        return _origin(self.layer, tuple(key.split(".")))


def shipped_configs() -> Path:
    """Folder of the configs that come with dtt: in the wheel, or in the clone."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def resolve(
    config: str | Path | Layer | None = None,
    arguments: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    job_config: Path | None = None,
    model_of: ModelOf | None = None,
) -> Resolved:
    """Merge all layers and check the result; every mistake is reported in one ConfigError.

    `config` is a path, the name of a shipped config, or its keys; `options` are dotted keys from
    named command-line options; `job_config` is the resolved config of a job that is resumed. With
    `model_of`, an `init.from` above these brings the `model` section of its source.
    """
    layers = [source.from_mapping(RunConfig().model_dump(mode="json"), "default")]
    if job_config is not None:
        layers += _with_extends(job_config, ())
    own = len(layers)
    if isinstance(config, dict):
        layers += _with_extended(*source.take_extends(config), Path(), ())
    elif config is not None:
        layers += _with_extends(find(config), ())
    layers.append(
        source.from_environment(os.environ if env is None else env, RunConfig.model_fields)
    )
    layers.append(source.from_arguments(arguments))
    layers.append(
        {tuple(k.split(".")): source.Leaf(v, "option") for k, v in (options or {}).items()}
    )
    layers = [_without_empty_sections(layer) for layer in layers]
    if model_of is not None:
        layers = _with_model_of_source(layers, own, model_of)
    return check(_with_shipped_dataset(source.merge(layers)))


def load_job(job: Path) -> RunConfig:
    """The resolved config that a job directory keeps."""
    path = job / "config.yaml"
    if source.is_config(job):
        raise ConfigError(
            f"{job} is a configuration file, not a job directory",
            next=f"dtt train -c {job}; other commands take the folder of its job, as jobs/run",
        )
    if not path.is_file():
        below, beside = (
            sorted(str(config.parent) for config in folder.glob("*/config.yaml"))
            for folder in (job, job.parent)
        )
        close = below[:3] or difflib.get_close_matches(str(job), beside, n=3)
        raise InputError(
            f"{job} is not a job directory",
            why="it holds no config.yaml" if job.is_dir() else "there is no such folder",
            next=f"did you mean {' or '.join(close)}?"
            if close
            else "name a folder such as jobs/quickstart",
        )
    return resolve(env={}, job_config=path).config


def find(config: str | Path) -> Path:
    """The file of a `-c` argument: a path, or a shipped config by name (`quickstart`)."""
    path = Path(config)
    if path.is_file():
        return path
    folder = shipped_configs()
    for candidate in (folder / path, folder / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    if (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is a job, not a config", next=f"dtt train {path} resumes it")
    if path.is_dir():
        inside = sorted(str(p) for p in path.glob("*") if p.suffix in source.SUFFIXES)
        raise ConfigError(
            f"{path} is a folder, not a config",
            next=f"-c {inside[0]}" if inside else f"-c takes a file; {path} holds no .yaml file",
        )
    found = (p.relative_to(folder) for p in folder.rglob("*.yaml") if p.parent.name != "sweeps")
    names = sorted(str(p.with_suffix("")) for p in found)
    beside = [str(p) for p in path.parent.glob("*") if p.suffix in source.SUFFIXES]
    close = difflib.get_close_matches(str(path), beside, n=3)
    close += difflib.get_close_matches(str(path.with_suffix("")), names, n=3)
    raise InputError(
        f"no config {str(config)!r}",
        where=path.absolute(),
        why="it is neither a file nor a shipped config",
        next=f"did you mean {' or '.join(close)}?"
        if close
        else f"name a file, or one that is shipped: {', '.join(names)}",
    )


def _with_extends(path: Path, trail: tuple[Path, ...]) -> list[Layer]:
    if path.resolve() in trail:
        raise ConfigError(f"{path} extends itself", where=" -> ".join(map(str, trail)))
    return _with_extended(*source.read_file(path), path.parent, (*trail, path.resolve()))


def _with_extended(
    extends: Sequence[str], layer: Layer, folder: Path, trail: tuple[Path, ...]
) -> list[Layer]:
    """What `layer` extends, found in `folder` or by name, below it."""
    layers: list[Layer] = []
    for name in extends:
        beside = folder / name
        layers += _with_extends(beside if beside.is_file() else find(name), trail)
    return [*layers, layer]


def _without_empty_sections(layer: Layer) -> Layer:
    """A section of which every line is commented out reads as null: it says nothing."""
    sections = explain.sections()
    return {k: v for k, v in layer.items() if v.value is not None or k not in sections}


def _with_model_of_source(layers: list[Layer], own: int, model_of: ModelOf) -> list[Layer]:
    """Put the `model` section that `init.from` stands for under the layer that says `init.from`.

    It replaces what lower layers say of the model's weights. That layer and those above it must
    agree with it: ConfigError names each key that does not. The first `own` layers (the defaults,
    and the job's own config, whose `model` section is complete) are not looked at.
    """
    last = max(i for i, layer in enumerate(layers) if INIT_FROM in layer)
    leaf = layers[last][INIT_FROM]
    if last < own or not isinstance(leaf.value, str) or not leaf.value.startswith(HF):
        return layers
    section = source.from_mapping({"model": model_of(leaf.value)}, f"init.from={leaf.value}")
    decided = {key[:2] for key in section} - {("model", name) for name in MAY_DIFFER}
    said = source.merge(
        {key: leaf for key, leaf in layer.items() if key[:2] in decided} for layer in layers[last:]
    )
    problems = [
        (key, f"{leaf.value!r} here, {section[key].value!r} in the model of init.from")
        for key, leaf in said.items()
        if key in section and leaf.value != section[key].value
    ]
    if problems:
        raise Mistakes(problems, said, "the configuration", next="leave out these keys of model")
    kept = {("model", name) for name in ("init_std", "dropout")}
    below = [
        {key: leaf for key, leaf in layer.items() if key[0] != "model" or key[:2] in kept}
        for layer in layers[1:last]
    ]
    return [layers[0], *below, section, *layers[last:]]


def _with_shipped_dataset(layer: Layer) -> Layer:
    """Where `download.dataset` names a file in configs/datasets/, put that file's keys below."""
    leaf = layer[("download", "dataset")]
    path = shipped_configs() / "datasets" / f"{leaf.value}.yaml"
    if not isinstance(leaf.value, str) or not path.is_file():
        return layer
    [facts] = _with_extends(path, ())
    said = {
        k: v for k, v in layer.items() if v.origin != "default" and k != ("download", "dataset")
    }
    return source.merge([layer, facts, said])


def check(layer: Layer) -> Resolved:
    """Validate a merged layer; ConfigError lists every problem with its file, line and key."""
    config, problems = validate(RunConfig, source.nested(layer))
    problems = list(_secrets(layer)) or problems  # other messages might show them
    if config is not None and not problems:
        return Resolved(config, layer)
    first = ".".join(takewhile(lambda name: not name.isdigit(), problems[0][0]))
    known = explain.nearest(first) or ""
    next = f"dtt config explain {known}".strip()
    raise Mistakes(problems, layer, "the configuration", next=next)


def _secrets(layer: Layer) -> Iterator[Problem]:
    """Values that would lay a secret open: the configuration is kept in the job directory."""
    somewhere = holds_secret("\n".join(str(leaf.value) for leaf in layer.values()))
    for key, leaf in layer.items():
        if somewhere and holds_secret(str(leaf.value)):
            yield key, "holds a password or an access token: give it in the environment or ~/.netrc"
        elif key[:-1] == ("launch", "environment") and named_secret(key[-1]):
            yield key, "is a secret by its name: export it where you submit, the job inherits it"


def validate(
    cls: type[SectionT], values: Mapping[str, Any]
) -> tuple[SectionT | None, list[Problem]]:
    """Nested plain values as a `cls`, or None and every problem."""
    try:
        # Through JSON: strict mode then takes a list for a tuple and a string for a path.
        section = cls.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        return None, [_describe(cls, values, dict(e)) for e in error.errors()]
    problems = list(_walk(section))
    return (None if problems else section), problems


def _walk(section: Section, key: Key = ()) -> Iterator[tuple[Key, str]]:
    for name, why in section.problems():
        yield (*key, *name.split(".")), why
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                yield from _walk(inner, (*key, name))


def _describe(cls: type[Section], values: Any, error: dict[str, Any]) -> Problem:
    """One pydantic error as key and why, without the tags of unions in the key."""
    key: list[str] = []
    inner = values
    for part in error["loc"]:
        if isinstance(inner, dict) and part not in inner and part == inner.get("type"):
            continue
        key.append(str(part))
        if isinstance(inner, dict):
            inner = inner.get(part)
        elif isinstance(inner, list) and isinstance(part, int):
            inner = inner[part]
    dotted = ".".join(key)
    if error["type"] == "extra_forbidden":
        close = explain.nearest(dotted, cls)
        why = "unknown key" + (f"; did you mean {close}?" if close else "")
        if close == dotted:  # known, but to another variant of its section
            why = (
                f"is for another {'.'.join(key[:-1])}.type than {explain.type_of(values, key[:-1])}"
            )
    else:
        shown = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
        match error["type"]:
            case "union_tag_invalid":
                dotted += ".type"
                why = (
                    f"must be one of {error['ctx']['expected_tags']} (got {error['ctx']['tag']!r})"
                )
            case "union_tag_not_found":
                dotted, why = f"{dotted}.type", "is missing: it says which one is meant"
            case "model_type" | "model_attributes_type":
                why = f"is a section: give its keys, as {dotted}.KEY=VALUE{shown}"
            case "int_parsing" | "int_type" | "float_type" if _leading_zero(error["input"]):
                why = f"a number is written without leading zeros{shown}"
            case _:
                why = error["msg"][0].lower() + error["msg"][1:] + shown
    return tuple(dotted.split(".")), why


def _leading_zero(value: Any) -> bool:
    return isinstance(value, str) and source.LEADING_ZERO.match(value) is not None


def _origin(layer: Layer, key: Key) -> str:
    for length in range(len(key), 0, -1):
        if key[:length] in layer:
            return layer[key[:length]].origin
    below = [leaf.origin for k, leaf in layer.items() if k[: len(key)] == key]
    return next((origin for origin in below if origin != "default"), "default")


def changes_on_resume(old: RunConfig, new: RunConfig) -> list[str]:
    """Dotted keys that differ and decide what is trained, so that a resume must not change them."""
    return [
        ".".join(key)
        for key, knob in explain.knobs(new)
        if not knob.free and knob.value != explain.value_at(old, key)
    ]
