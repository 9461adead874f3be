"""Layers that an adapter adapts, with their ranks and scales; see `dtt.model.lora`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from dtt.base.errors import ConfigError
from dtt.base.patterns import SlowPattern, match_name
from dtt.config.adapter import ALL_LINEAR, AdapterConfig, LoraConfig
from dtt.model import count
from dtt.model.architecture import AnyArchitecture, BuiltArchitecture


@dataclass(frozen=True)
class Adapted:
    """The adapter of one layer."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Factor of B A."""
        # PEFT computes in this order, and the result is rounded once.
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def adapted_layers(cfg: LoraConfig, arch: AnyArchitecture) -> dict[str, Adapted]:
    """Return the adapter of each adapted layer, by the name of the layer.

    Raises ConfigError for a target or a pattern that matches no layer.
    """
    names = [name.removesuffix(".weight") for name in adaptable(arch)]
    targets = _targets(cfg.targets, names)
    ranks = _by_pattern("rank_pattern", cfg.rank_pattern, targets)
    alphas = _by_pattern("alpha_pattern", cfg.alpha_pattern, targets)
    return {
        name: Adapted(int(ranks.get(name, cfg.rank)), alphas.get(name, cfg.alpha), cfg.rslora)
        for name in targets
    }


def adapter_weights(cfg: AdapterConfig, arch: AnyArchitecture) -> int:
    """Return the number of weights of all A and B; 0 without an adapter."""
    if not isinstance(cfg, LoraConfig):
        return 0
    shapes = adaptable(arch)
    return sum(
        adapted.rank * sum(shapes[f"{name}.weight"])
        for name, adapted in adapted_layers(cfg, arch).items()
    )


def adaptable(arch: AnyArchitecture) -> dict[str, count.Shape]:
    """Return the shape of each matrix that may have an adapter, by its name.

    In a mixture they are those of attention: experts are stacks, of which PEFT has other adapters.
    """
    if isinstance(arch, BuiltArchitecture):
        return {name: tuple(weight.shape) for name, weight in arch.skeleton.linear_weights()}
    shapes = count.layer_shapes(arch, 0).items()
    of_mixture = arch.mixture is not None
    of_layer = {n: s for n, s in shapes if len(s) == 2 and not (of_mixture and ".mlp" in f".{n}")}
    return {
        f"layers.{i}.{name}": shape
        for i in range(arch.n_layers)
        for name, shape in of_layer.items()
    }


def inner(name: str) -> str:
    """Return the name of a layer within its block."""
    return re.sub(r"^.*?\b\d+\.", "", name)


def _targets(targets: str | tuple[str, ...], names: list[str]) -> list[str]:
    if targets == ALL_LINEAR:
        return names
    if isinstance(targets, str):
        return _matching("targets", targets, targets, names)
    # Each by itself: a list of which one entry is misspelt would train less than was asked for.
    found: set[str] = set()
    for target in targets:
        ends = [name for name in names if f".{name}".endswith(f".{target}")]
        if not ends:
            raise _no_match("targets", target, names)
        found.update(ends)
    return [name for name in names if name in found]


def _by_pattern(key: str, patterns: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """Return the value of the first pattern that matches each name; the others are left out."""
    # The rule of PEFT: a pattern matches the end of a name from a dot on, or all of it.
    found: dict[str, float] = {}
    for pattern, value in patterns.items():
        for name in _matching(key, pattern, rf"(.*\.)?({pattern})", names):
            found.setdefault(name, value)
    return found


def _matching(key: str, given: str, pattern: str, names: list[str]) -> list[str]:
    """Return the names that a pattern matches; ConfigError if there is none, or it is too slow."""
    try:
        found = [name for name in names if match_name(pattern, name)]
    except SlowPattern as slow:
        raise ConfigError(
            f"{given!r} is not matched in time", where=f"adapter.{key}", why=str(slow),
            next="write a simpler pattern, or names of layers",
        ) from None  # fmt: skip
    if not found:
        raise _no_match(key, given, names)
    return found


def _no_match(key: str, pattern: str, names: list[str]) -> ConfigError:
    ends = dict.fromkeys(map(inner, names))
    return ConfigError(
        f"no adapted layer has a name that {pattern!r} matches",
        where=f"adapter.{key}",
        why=f"the layers are layers.N.{{{','.join(ends)}}}; the head and the embedding cannot be "
        "adapted, nor can the MLPs of a mixture",
    )
