"""Resolution of configuration layers into one checked `RunConfig` with the origin of every value.

Layers in order of increasing precedence: defaults, the job's own config (on resume), `extends` from
left to right, the file, the environment, `key=value` arguments, named options.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log_once
from dtt.base.secrets import holds_secret, named_secret
from dtt.config import explain, stages
from dtt.config.init import HF, MAY_DIFFER
from dtt.config.key_types import STAGES
from dtt.config.layers import (
    Layer,
    Leaf,
    from_arguments,
    from_environment,
    from_mapping,
    is_config,
    read_file,
    shown,
)
from dtt.config.merging import (
    STEPS,
    Resolved,
    length_layer,
    merge,
    nested,
    origin_of,
    overlap,
    take_extends,
)
from dtt.config.own import run_config
from dtt.config.removed import without_removed
from dtt.config.run import RunConfig
from dtt.config.shipped import find, is_job, shipped_configs, shipped_file
from dtt.config.stages import INIT_FROM, Entry
from dtt.config.validation import Problem, validate

ModelOf = Callable[[str], Mapping[str, Any]]
"""A function that returns the `model` section of released weights for a value of `init.from`."""


class Mistakes(ConfigError):
    """All errors of a configuration, each with its file and line."""

    def __init__(self, problems: Sequence[Problem], layer: Layer, of: str, *, next: str) -> None:
        """Format the message; `of` names the input, `layer` holds the origin of each value."""
        self.problems = tuple(problems)
        self.layer, self.next = layer, next
        count = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''} in {of}"
        lines = [f"  {origin_of(layer, key)}  {'.'.join(key)}: {why}" for key, why in problems]
        super().__init__("\n".join([count, *lines]), next=next)

    def in_stage(self, name: str) -> Mistakes:
        """Return the same errors as those of a stage."""
        return Mistakes(self.problems, self.layer, f"stage {name}", next=self.next)


def resolve(
    config: str | Path | Layer | None = None,
    arguments: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    job_config: Path | None = None,
    model_of: ModelOf | None = None,
    stage: str | None = None,
    run_code: bool = True,
    kept_code: bool = True,
) -> Resolved:
    """Merge all layers and check the result; every mistake is reported in one ConfigError.

    `config` is a path, the name of a shipped config, or its keys; `options` are dotted keys from
    named command-line options; `job_config` is the resolved config of a job that is resumed. With
    `model_of`, the `model` section of the weights that `init.from` names is merged in as well,
    unless only the defaults or `job_config` set `init.from`. `stage` selects a stage of a
    configuration with stages; it is an error to specify none. Without `run_code`, classes of a
    user's own are not imported; with `kept_code`, they come from the files that the job keeps.
    """
    layers, own = _layers(config, arguments, options, env, job_config)
    job = job_config.parent if job_config is not None and kept_code else None
    resolver = _Resolver(own, model_of, run_code, job)
    common, entries = stages.take(layers)
    if not entries:
        if stage is not None:
            raise ConfigError(
                f"--stage {stage}: the configuration defines no stages",
                next="omit --stage, or add `stages` to the configuration",
            )
        return resolver.one(common)
    names = [entry.name for entry in entries]
    origin = next(layer[STAGES].origin for layer in reversed(layers) if STAGES in layer)
    if stage is None:
        raise ConfigError(
            f"the configuration defines stages: {', '.join(names)}",
            where=origin,
            why="this command works on one of them",
            next=f"--stage {names[0]}, or its file: dtt config show -c FILE --stage {names[0]}; "
            "dtt pipeline and dtt submit train all stages",
        )
    if stage not in names:
        raise stages.unknown(stage, names, origin)
    return resolver.stages(common, entries)[stage]


def config_class(config: str | Path | Layer | None, arguments: Sequence[str]) -> type[RunConfig]:
    """Return the class of a configuration, with the own classes that it names; nothing else of it
    is checked."""
    return run_config(_layers(config, arguments, None, None, None)[0], runs=True, job=None)


def stage_names(
    config: str | Path | Layer | None, arguments: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of the stages that a configuration describes, in order; may be empty."""
    _, entries = stages.take(_layers(config, arguments, None, None, None)[0])
    return tuple(entry.name for entry in entries)


def on_profile(config: str | Path | Layer | None, profile: Path) -> Layer:
    """Return a configuration whose keys a cluster profile overrides, one by one."""
    names, own = take_extends(config if isinstance(config, dict) else {})
    names += [] if config is None or isinstance(config, dict) else [str(config)]
    theirs = [key for layer in _with_extends(profile, ()) for key in layer]
    kept = {k: leaf for k, leaf in own.items() if not any(overlap(k, key) for key in theirs)}
    return {**kept, ("extends",): Leaf([*names, str(profile)], "--cluster")}


def _layers(
    config: str | Path | Layer | None,
    arguments: Sequence[str],
    options: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    job_config: Path | None,
) -> tuple[list[Layer], int]:
    """Return all layers, lowest first, and the number of them that are defaults or `job_config`."""
    # All keys are present from the start, so that every value has an origin.
    layers = [from_mapping(RunConfig().model_dump(mode="json"), "default")]
    if job_config is not None:
        stored = _with_extends(job_config, ())
        if not any(stored):
            raise ConfigError(
                f"{job_config} is empty",
                why="dtt writes every key of a job there",
                next=f"restore it, for example from {job_config.parent}/attempts/1/config.yaml, or "
                "start a new job with -c FILE",
            )
        layers += stored
    own = len(layers)
    if isinstance(config, dict):
        layers += _with_extended(*take_extends(config), Path(), ())
    elif config is not None:
        layers += _with_extends(find(config), ())
    env = os.environ if env is None else env
    layers.append(from_environment(env, RunConfig.model_fields, explain.key_types()))
    layers.append(from_arguments(arguments, explain.key_types()))
    layers.append({tuple(k.split(".")): Leaf(v, "option") for k, v in (options or {}).items()})
    return layers, own


@dataclass(frozen=True)
class _Resolver:
    """The merge and the check of layers, for one job or for the stages of a configuration."""

    own: int
    """The number of lowest layers that are the defaults or a job's own."""
    model_of: ModelOf | None
    runs: bool
    """False: keys of a user's own classes stay as they are written, and no code is imported."""
    job: Path | None
    """The job whose copies of the files of these classes are used."""

    def one(self, layers: Sequence[Layer], own: int | None = None) -> Resolved:
        """Merge and check the layers of one job; `own` is another number of its own ones."""
        # A section whose value is null has lines that are all commented out.
        sections = explain.sections()
        layers = without_removed(
            {k: leaf for k, leaf in layer.items() if leaf.value is not None or k not in sections}
            for layer in layers
        )
        if self.model_of is not None:
            own = self.own if own is None else own
            layers = _with_model_of_source(layers, own, self.model_of)
        layers.append(length_layer(layers))
        cls = run_config(layers, runs=self.runs, job=self.job)
        merged, dropped = merge(layers, explain.key_types(cls).variants)
        resolved = replace(check(_with_shipped_dataset(merged), cls), dropped=dropped)
        for line in explain.dropped_lines(resolved):
            log_once(line)
        return resolved

    def stages(self, common: Sequence[Layer], entries: Sequence[Entry]) -> dict[str, Resolved]:
        """Return the configuration of each stage by name."""
        resolved: dict[str, Resolved] = {}
        # A job's own config names that stage and holds its keys; the first stage must not inherit
        # the name of a later one.
        fresh = [common[0], *common[self.own :]]
        name = merge(fresh)[0].get(("name",), Leaf(None, "name"))
        first: Resolved | None = None
        for entry in entries:
            # In order: each stage takes the job folder of the one before it.
            previous = resolved[list(resolved)[-1]].config.job_dir if resolved else Path()
            layers = stages.layers_of(entry, common if first else fresh, name, first, previous)
            try:
                stage = self.one(layers, None if first else 1)
                trained = None if first is None else stages.trained_tokenizer(first, stage)
                if trained is not None:
                    # Resolved again, because the tokenizer decides about the token folder.
                    stage = self.one([*(_without(layer, "tokenizer") for layer in layers), trained])
            except Mistakes as mistakes:
                raise mistakes.in_stage(entry.name) from None
            found = list(stages.problems(stage, first)) if first is not None else []
            if found:
                next = f"remove these keys from stage {entry.name}"
                raise Mistakes(found, stage.layer, f"stage {entry.name}", next=next)
            resolved[entry.name] = stage
            first = first or stage
        return resolved


def with_steps(resolved: Resolved, steps: int) -> Resolved:
    """Return the configuration with the number of steps that `train.epochs` resolves to.

    Returns it unchanged without `train.epochs`. Raises ConfigError if another key, such as a
    warm-up, does not fit into these steps.
    """
    epochs = resolved.config.train.epochs
    if epochs is None:
        return resolved
    # Checked again: warm-up and decay may not fit into this number of steps.
    layer = resolved.layer | {STEPS: Leaf(steps, f"train.epochs={epochs:g}")}
    return check(layer, type(resolved.config))


def load_job(job: Path, *, run_code: bool = False) -> RunConfig:
    """Return the resolved config stored in a job directory.

    Unless `run_code`, the keys of classes of a user's own are as they are written: only training
    needs their code.
    """
    path = job / "config.yaml"
    if is_config(job):
        raise ConfigError(
            f"{job} is a configuration file, not a job directory",
            next=f"dtt train -c {job}; other commands take the folder of its job, as jobs/run",
        )
    if not path.is_file():
        below, beside = (
            sorted(str(config.parent) for config in folder.glob("*/config.yaml"))
            for folder in (job, job.parent)
        )
        # The name of a job without its folder, or a folder within a job, such as a checkpoint.
        near = [folder for folder in (Path("jobs") / job, *job.parents) if is_job(folder)]
        close = below[:3] or [str(folder) for folder in near[:1]]
        close = close or difflib.get_close_matches(str(job), beside, n=3)
        if not close and (shipped_configs() / job.with_suffix(".yaml")).is_file():
            raise InputError(
                f"{job} is not a job directory",
                why="it is the name of a shipped configuration",
                next=f"dtt train -c {job.with_suffix('')} starts its job",
            )
        raise InputError(
            f"{job} is not a job directory",
            why="it does not contain config.yaml"
            if job.is_dir()
            else "it is a file"
            if job.exists()
            else "there is no such folder",
            next=f"did you mean {' or '.join(close)}?"
            if close
            else "specify a folder such as jobs/quickstart",
        )
    state = path.stat()
    return _stored(path, run_code, state.st_ino, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _stored(path: Path, run_code: bool, *_version: int) -> RunConfig:
    """Return the configuration in a file; its inode, time and size tell versions of it apart.

    Kept, because a command that resumes a job needs it five times, and reading it takes 17 ms.
    """
    # Without environment and arguments: the stored configuration means the same on every machine.
    return resolve(env={}, job_config=path, run_code=run_code).config


def _with_extends(path: Path, trail: tuple[Path, ...]) -> list[Layer]:
    # Resolved paths: a link or `./` must not hide a cycle.
    if path.resolve() in trail:
        raise ConfigError(f"{path} extends itself", where=" -> ".join(map(str, trail)))
    layer = read_file(path, explain.key_types())
    return _with_extended(*take_extends(layer), path.parent, (*trail, path.resolve()))


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


def _without(layer: Layer, section: str) -> Layer:
    return {key: leaf for key, leaf in layer.items() if key[0] != section}


def _with_model_of_source(layers: list[Layer], own: int, model_of: ModelOf) -> list[Layer]:
    """Insert the `model` section of the weights in `init.from` below the layer that sets it.

    It replaces the `model` keys of lower layers, except `init_std` and `dropout`. The layer that
    sets `init.from` and those above it must agree with it, except for the keys in MAY_DIFFER:
    ConfigError names each key that does not. The layers are returned unchanged if only the first
    `own` of them (the defaults, and the job's own config, whose `model` section is complete) set
    `init.from`.
    """
    # The highest layer decides which weights are meant. Layers below it describe another model.
    last = max(i for i, layer in enumerate(layers) if INIT_FROM in layer)
    leaf = layers[last][INIT_FROM]
    # A job that resumes has its complete `model` section; its weights come from the checkpoint.
    if last < own or not isinstance(leaf.value, str) or not leaf.value.startswith(HF):
        return layers
    section = from_mapping({"model": model_of(leaf.value)}, f"init.from={leaf.value}")
    # A source may leave keys open, such as the context length: these stay configurable.
    decided = {key[:2] for key in section} - {("model", name) for name in MAY_DIFFER}
    # Only layers at or above `init.from`: they knew the weights. A contradiction there is a mistake
    # of the user, one below is an older choice that is replaced.
    said, _ = merge(
        {key: leaf for key, leaf in layer.items() if key[:2] in decided} for layer in layers[last:]
    )
    problems = [
        (key, f"{shown(leaf.value)} here, {shown(section[key].value)} in the model of init.from")
        for key, leaf in said.items()
        if key in section and leaf.value != section[key].value
    ]
    if problems:
        raise Mistakes(problems, said, "the configuration", next="remove these keys from model")
    kept = {("model", name) for name in ("init_std", "dropout")}
    below = [
        {key: leaf for key, leaf in layer.items() if key[0] != "model" or key[:2] in kept}
        for layer in layers[1:last]
    ]
    # The defaults stay lowest, for keys that the section lacks.
    return [layers[0], *below, section, *layers[last:]]


def _with_shipped_dataset(layer: Layer) -> Layer:
    """Insert the keys of a shipped dataset below all keys that were set explicitly.

    The dataset is the file in configs/datasets/ that `download.dataset` names, if any, or an entry
    of `download.datasets`.
    """
    several = layer[("download", "datasets")]
    if isinstance(several.value, list):
        entries = [_with_shipped_entry(entry) for entry in several.value]
        layer = layer | {("download", "datasets"): Leaf(entries, several.origin)}
    leaf = layer[("download", "dataset")]
    if (path := shipped_file(f"{leaf.value}.yaml", "datasets")) is None:
        return layer
    [facts] = _with_extends(path, ())
    # Defaults stay below the dataset: only what somebody set overrides it.
    said = {
        k: v for k, v in layer.items() if v.origin != "default" and k != ("download", "dataset")
    }
    return merge([layer, facts, said])[0]


def _with_shipped_entry(entry: Any) -> Any:
    """Return an entry of `download.datasets` with the keys of the shipped dataset it names."""
    named = entry.get("dataset") if isinstance(entry, dict) else None
    path = shipped_file(f"{named}.yaml", "datasets")
    if named is None or path is None:
        return entry
    [facts] = _with_extends(path, ())
    own = {key: value for key, value in entry.items() if key != "dataset"}
    return {key[1]: leaf.value for key, leaf in facts.items() if key[0] == "download"} | own


def check(layer: Layer, cls: type[RunConfig] = RunConfig) -> Resolved:
    """Validate a merged layer; ConfigError lists every problem with its file, line and key."""
    config, problems = _validated(json.dumps(nested(layer), default=str), cls)
    # If there is a secret, report it alone: the messages of other problems might print it.
    problems = list(_secrets(layer)) or problems
    if config is not None and not problems:
        return Resolved(config, layer)
    first = ".".join(takewhile(lambda name: not name.isdigit(), problems[0][0]))
    known = explain.nearest(first, cls) or ""
    next = f"dtt config explain {known}".strip()
    raise Mistakes(problems, layer, "the configuration", next=next)


@lru_cache(maxsize=16)
def _validated(text: str, cls: type[RunConfig]) -> tuple[RunConfig | None, list[Problem]]:
    """Validate the values of a configuration as JSON, once for all layers that lead to them."""
    return validate(cls, json.loads(text))


def _secrets(layer: Layer) -> Iterator[Problem]:
    """Yield values that would expose a secret: the configuration is stored in the job directory."""
    # One search over all values first: the search per value is slow, and rarely needed.
    somewhere = holds_secret("\n".join(str(leaf.value) for leaf in layer.values()))
    for key, leaf in layer.items():
        if somewhere and holds_secret(str(leaf.value)):
            yield key, "contains a password or a token: put it into the environment or ~/.netrc"
        elif key[:-1] == ("launch", "environment") and named_secret(key[-1]):
            yield key, "has the name of a secret: export it before you submit, the job inherits it"


def changes_on_resume(old: RunConfig, new: RunConfig) -> list[str]:
    """Return the keys that differ and affect what is trained; a resume must not change them."""
    derived = {STEPS} if new.train.epochs is not None else set()  # the data is the same
    return [
        # Keys that only say where or how to run may differ. All others would change the training
        # silently.
        ".".join(key)
        for key, value, may_change in explain.values(new)
        if not may_change and key not in derived and value != explain.value_at(old, key)
    ]
