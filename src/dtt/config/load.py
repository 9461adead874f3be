"""Resolution of configuration layers into one checked `RunConfig` with the origin of every value.

Layers in order of increasing precedence: defaults, the job's own config (on resume), `extends` from
left to right, the file, the environment, `key=value` arguments, named options.
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
"""A key and the reason why its value is invalid."""

ModelOf = Callable[[str], Mapping[str, Any]]
"""A function that returns the `model` section of released weights for a value of `init.from`."""

INIT_FROM: Key = ("init", "from")

SectionT = TypeVar("SectionT", bound=Section)


class Mistakes(ConfigError):
    """All errors of a configuration, each with its file and line."""

    def __init__(self, problems: Sequence[Problem], layer: Layer, of: str, *, next: str) -> None:
        """Format the message; `of` names the input, `layer` holds the origin of each value."""
        self.problems = tuple(problems)
        count = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''} in {of}"
        lines = [f"  {_origin(layer, key)}  {'.'.join(key)}: {why}" for key, why in problems]
        super().__init__("\n".join([count, *lines]), next=next)


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and the merged layer it was built from."""

    config: RunConfig
    layer: Layer

    def origin(self, key: str) -> str:
        """Return the origin of the value of a dotted `key`: `file:line`, `argument`, `default`."""
        return _origin(self.layer, tuple(key.split(".")))


def shipped_configs() -> Path:
    """Return the folder of the configs shipped with dtt: in the wheel, or in the clone."""
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
    `model_of`, the `model` section of the weights that `init.from` names is merged in as well,
    unless only the defaults or `job_config` set `init.from`.
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
    """Return the resolved config stored in a job directory."""
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
    """Return the file of a `-c` argument: a path, or a shipped config by name (`quickstart`)."""
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
    """Return the layers that `layer` extends, and `layer` last.

    Each name is a file relative to `folder`, or anything that `find` accepts.
    """
    layers: list[Layer] = []
    for name in extends:
        beside = folder / name
        layers += _with_extends(beside if beside.is_file() else find(name), trail)
    return [*layers, layer]


def _without_empty_sections(layer: Layer) -> Layer:
    """Remove sections whose value is null: all lines below such a section are commented out."""
    sections = explain.sections()
    return {k: v for k, v in layer.items() if v.value is not None or k not in sections}


def _with_model_of_source(layers: list[Layer], own: int, model_of: ModelOf) -> list[Layer]:
    """Insert the `model` section that `init.from` stands for below the layer that sets `init.from`.

    It replaces the `model` keys of lower layers, except `init_std` and `dropout`. The layer that
    sets `init.from` and those above it must agree with it, except for the keys in MAY_DIFFER:
    ConfigError names each key that does not. The layers are returned unchanged if only the first
    `own` of them (the defaults, and the job's own config, whose `model` section is complete) set
    `init.from`.
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
    """Insert the keys of a shipped dataset below all keys that were set explicitly.

    The dataset is the file in configs/datasets/ that `download.dataset` names, if any.
    """
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
    # If there is a secret, report it alone: the messages of other problems might print it.
    problems = list(_secrets(layer)) or problems
    if config is not None and not problems:
        return Resolved(config, layer)
    first = ".".join(takewhile(lambda name: not name.isdigit(), problems[0][0]))
    known = explain.nearest(first) or ""
    next = f"dtt config explain {known}".strip()
    raise Mistakes(problems, layer, "the configuration", next=next)


def _secrets(layer: Layer) -> Iterator[Problem]:
    """Yield values that would expose a secret: the configuration is stored in the job directory."""
    somewhere = holds_secret("\n".join(str(leaf.value) for leaf in layer.values()))
    for key, leaf in layer.items():
        if somewhere and holds_secret(str(leaf.value)):
            yield key, "holds a password or an access token: give it in the environment or ~/.netrc"
        elif key[:-1] == ("launch", "environment") and named_secret(key[-1]):
            yield key, "is a secret by its name: export it where you submit, the job inherits it"


def validate(
    cls: type[SectionT], values: Mapping[str, Any]
) -> tuple[SectionT | None, list[Problem]]:
    """Return nested plain values as a `cls` and no problems, or None and every problem."""
    try:
        # Validate as JSON: strict mode then accepts a list for a tuple and a string for a path.
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
    """Convert a pydantic error to its key, without the tags of unions, and the reason."""
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
        if close == dotted:  # a key of another variant of this section
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
    """Return the keys that differ and affect what is trained; a resume must not change them."""
    return [
        ".".join(key)
        for key, knob in explain.knobs(new)
        if not knob.free and knob.value != explain.value_at(old, key)
    ]
