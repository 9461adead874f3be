"""Keys of a sweep file: a base configuration, and the values that some of its keys take."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt, create_model

from dtt.base.errors import ConfigError, DttError
from dtt.config import explain, load, validation
from dtt.config.base import Section
from dtt.config.key_types import KeyTypes
from dtt.config.layers import Layer, Leaf, read_file
from dtt.config.merging import Resolved, nested, take_extends
from dtt.config.own import OwnCodeError
from dtt.config.run import NAME, RunConfig
from dtt.config.shipped import find

Number = int | FiniteFloat

TOO_MANY = 1000
"""Maximum number of combinations of a sweep."""


class SweptValues(Section):
    """The values of one key. A plain list is short for `values`."""

    values: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None
    """Explicit values, in this order; `mode: random` draws from them."""
    uniform: tuple[Number, Number] | None = None
    """Uniform distribution over `[low, high]`, from which `mode: random` draws."""
    loguniform: tuple[Number, Number] | None = None
    """Log-uniform distribution over `[low, high]`, from which `mode: random` draws."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each invalid or contradictory definition of values."""
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            yield "", f"takes a list, or one of uniform and loguniform (got {names})"
        if self.loguniform is not None and not min(self.loguniform) > 0:
            yield "loguniform", f"requires positive bounds, got {list(self.loguniform)}"

    def drawn(self, rng: random.Random) -> Any:
        """Draw one value with `rng`."""
        way = rng.random()
        if self.values is not None:
            return self.values[int(way * len(self.values))]
        if self.uniform is not None:
            low, high = self.uniform
            return float(f"{low + (high - low) * way:.6g}")
        assert self.loguniform is not None
        low, high = map(math.log, self.loguniform)
        return float(f"{math.exp(low + (high - low) * way):.6g}")


REMOVED = ("range", "linspace", "logspace", "choice", "count")
"""Forms of values of earlier versions."""


class SweepConfig(Section):
    """The contents of a sweep file. `base` may also be a mapping."""

    trials: ClassVar[type[RunConfig]] = RunConfig
    """The class of the trials' configurations, which knows the keys of a user's own classes."""

    name: str = Field(pattern=f"^{NAME}$")
    """Name of the sweep; its folder is `jobs/<name>`. Default: the file's name without suffix."""
    base: str | None = None
    """Configuration below every trial: a file (relative to this one, or to the working directory),
    a shipped configuration, or the keys themselves, which may include `extends`."""
    overrides: tuple[str, ...] = ()
    """Settings `key=value` that override the base in every trial."""
    parameters: dict[str, SweptValues] = Field(default={})
    """Dotted keys and the values of each."""
    mode: Literal["product", "zip", "random"] = "product"
    """Combination of values: `product`: every combination; `zip`: the first values together, then
    the second, …; `random`: `samples` randomly drawn combinations."""
    samples: Annotated[int, Field(gt=0, le=TOO_MANY)] | None = None
    """Number of combinations that `mode: random` draws."""
    draw_seed: NonNegativeInt = 0
    """Random seed of all values that are drawn."""
    seeds: tuple[NonNegativeInt, ...] = ()
    """Values of `seed` with which every combination is trained; results are means over them."""
    metric: str = Field(default="eval.loss", pattern=r"^[a-z]+\.[a-z_]+$")
    """Kind and field of a record in metrics.jsonl, such as `eval.bits_per_byte` or
    `perf.tokens_per_second`; the last such record of a trial counts."""
    goal: Literal["min", "max"] = "min"
    """Direction of the metric: `min` if lower is better, `max` if higher is better."""
    concurrency: PositiveInt | None = None
    """Maximum number of trials that run at once; `--local` overrides it."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each unknown key and each option that does not fit the mode."""
        known = {".".join(key) for key, _, _ in explain.all_fields(self.trials)}
        known -= {".".join(key) for key in explain.sections(self.trials)} | {"name"}
        for key, values in self.parameters.items():
            for name, why in values.problems():
                yield f"parameters.{key}.{name}".rstrip("."), why
            word = key.rpartition(".")[2]
            if key not in known and word in REMOVED:
                why = "no longer exists: write the values out, or draw them with mode: random"
                yield f"parameters.{key}", why
            elif key not in known:
                close = explain.nearest(key, self.trials)
                why = f"; did you mean {close}?" if close in known else ""
                yield f"parameters.{key}", "is not a key that a sweep can change" + why
            if self.mode != "random" and values.values is None:
                yield f"parameters.{key}", f"is drawn: mode: {self.mode} needs a list"
        if (self.mode == "random") != (self.samples is not None):
            yield "samples", "mode: random needs it, and no other mode takes it"
        if self.seeds and "seed" in self.parameters:
            yield "seeds", "the parameters already contain a seed"
        if not self.seeds and not self.parameters:
            yield "parameters", "nothing varies: add a key here, or some seeds"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that vary between trials."""
        return (*self.parameters, *(("seed",) if self.seeds else ()))


def combinations(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Return the swept values of each combination, in order.

    Raises ConfigError if there are more than TOO_MANY, or if the lengths do not match with
    `mode: zip`.
    """
    columns: dict[str, list[Any]] = {}
    for key, values in sweep.parameters.items():
        rng = random.Random(f"{sweep.draw_seed} {key}")
        drawn = [values.drawn(rng) for _ in range(sweep.samples or 0)]
        columns[key] = drawn if sweep.mode == "random" else list(values.values or ())
    lengths = {key: len(column) for key, column in columns.items()}
    # zip of no columns yields nothing, but the product of none yields the one row of the base.
    together = sweep.mode != "product" and bool(columns)
    if together and len(set(lengths.values())) > 1:
        raise ConfigError(
            "mode: zip needs the same number of values for each key",
            why="there are " + ", ".join(f"{n} of {key}" for key, n in lengths.items()),
            next="give each key the same number of values, or omit `mode` to try all of them",
        )
    seeds: list[dict[str, Any]] = [{"seed": seed} for seed in sweep.seeds] or [{}]
    # Counted before they are made: a product may be larger than the memory.
    number = (max(lengths.values()) if together else math.prod(lengths.values())) * len(seeds)
    if number > TOO_MANY:
        raise ConfigError(
            f"{number:,} combinations are too many",
            why=", ".join(f"{n} values of {key}" for key, n in lengths.items()),
        )
    rows = (zip if together else product)(*columns.values())
    return [dict(zip(columns, row, strict=True)) | seed for row in rows for seed in seeds]


@dataclass(frozen=True)
class SweepFile:
    """A checked sweep file and the base configuration of its trials."""

    path: Path
    sweep: SweepConfig
    base: str | Path | Layer | None

    def resolve(
        self, values: Mapping[str, Any], name: str, model_of: load.ModelOf | None = None
    ) -> Resolved:
        """Return the configuration of the trial `name` with these values of the swept keys."""
        options = {**values, "name": name}
        resolved = load.resolve(self.base, self.sweep.overrides, options, model_of=model_of)
        said = {
            key: Leaf(leaf.value, f"sweep {self.path}") if leaf.origin == "option" else leaf
            for key, leaf in resolved.layer.items()
        }
        return replace(resolved, layer=said)

    def on_cluster(self, profile: Path) -> SweepFile:
        """Return the same sweep with a cluster profile that overrides the base of its trials."""
        return replace(self, base=load.on_profile(self.base, profile))


def read(path: Path) -> SweepFile:
    """Read a sweep file, or a shipped one by name.

    Raises ConfigError, which lists every mistake with its line.
    """
    path = find(path, "sweeps")
    extends, layer = take_extends(read_file(path, _key_types()))
    if extends:
        raise ConfigError(f"{path}: a sweep cannot extend a file", next=f"base: {extends[0]}")
    layer.setdefault(("name",), Leaf(path.stem, "the file's name"))
    base = {key[1:]: leaf for key, leaf in layer.items() if key[0] == "base" and len(key) > 1}
    values = nested({k: v for k, v in layer.items() if k[0] != "parameters"})
    values["parameters"] = _parameters(layer)
    if isinstance(values.get("base"), dict):  # may be empty: the trials have the defaults
        del values["base"]
    beside = path.parent / str(values.get("base") or "")
    below = base or (beside if beside.is_file() else values.get("base"))
    sweep, problems = validation.validate(_class_for(below, values.get("overrides")), values)
    if sweep is None:
        # The layer has `parameters.optim.lr` in its parts, `parameters` has `optim.lr`.
        problems = [(tuple(".".join(key).split(".")), why) for key, why in problems]
        raise load.Mistakes(problems, layer, "the sweep", next="docs/sweep.md shows each key")
    return SweepFile(path, sweep, below)


def _class_for(base: Any, overrides: Any) -> type[SweepConfig]:
    """Return the class of a sweep file whose trials have this base, which is not checked yet."""
    try:
        trials = load.config_class(base, overrides or ())
    except OwnCodeError:
        raise
    except (DttError, OSError, TypeError, ValueError, AttributeError):
        return SweepConfig  # the base is wrong itself: its own error is better
    if trials is RunConfig:
        return SweepConfig
    bound = create_model(SweepConfig.__name__, __base__=SweepConfig, __module__=__name__)
    bound.trials = trials
    return bound


def _key_types() -> KeyTypes:
    """Return the types of the keys of a sweep file, in which `base` is a configuration."""
    own, base = explain.key_types(SweepConfig), explain.key_types().under("base")
    values = {
        ("parameters", *key, *word, "*"): types
        for key, types in explain.key_types().texts.items()
        for word in ((), ("values",))
    }
    return KeyTypes({**own.texts, **base.texts, **values}, base.mappings, base.variants)


def _parameters(layer: Layer) -> Any:
    """Return `parameters` by dotted key; a plain list becomes its `values`."""
    if ("parameters",) in layer:
        return layer[("parameters",)].value  # not a mapping: validation reports the error
    found: dict[str, dict[str, Any]] = {}
    for key, leaf in layer.items():
        if key[0] == "parameters":
            worded = len(key) > 2 and key[-1] in SweptValues.model_fields
            dotted, word = (key[1:-1], key[-1]) if worded else (key[1:], "values")
            found.setdefault(".".join(dotted), {})[word] = leaf.value
    return found
