"""Parameter groups: optimizer, learning rate and decay of each parameter, by role or by name."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dtt.config.optim import AdamWGroup, MuonConfig, MuonGroup, OptimConfig
from dtt.errors import ConfigError
from dtt.optim.adamw import RoundedAdamW
from dtt.optim.muon.optimizer import Muon
from dtt.optim.rounding import StochasticRounding

T = TypeVar("T")


class Settings(NamedTuple):
    """Optimizer settings of a parameter; parameters with equal settings form a group."""

    optimizer: str
    """`muon` or `adamw`."""
    label: str
    """The role, followed by the pattern of the `optim.groups` entry that applies, if any."""
    lr: float
    """Learning rate at the peak of the schedule."""
    weight_decay: float
    betas: tuple[float, float] | None = None
    """For AdamW only, like `eps`."""
    eps: float | None = None
    split: tuple[int, ...] | None = None
    """For Muon only: rows of each matrix in the parameter."""


def build(
    config: OptimConfig,
    parameters: Mapping[str, nn.Parameter],
    roles: Mapping[str, str],
    ns_dtype: torch.dtype,
    multipliers: Mapping[str, Mapping[str, float]] | None = None,
    rounding: StochasticRounding | None = None,
) -> dict[str, Optimizer]:
    """Return the optimizers by name (`muon`, `adamw`); together they hold each parameter once.

    `roles` must give every parameter a role: matrix | embed | head | vector. With a Muon config,
    Muon takes the matrices and AdamW the rest, unless `config.groups` assigns them by name.
    `multipliers` are factors of learning rates, by optimizer and name, 1 if absent; weight decay is
    divided by them, so that each step decays weights by the same amount. `rounding` is for bf16
    parameters. Groups carry their parameters' `names`, their `label` and `peak_lr`. Raise
    ConfigError if an entry of `config.groups` does not fit the parameters it matches, and
    ValueError if a parameter has no role.
    """
    unassigned = parameters.keys() - roles.keys()
    if unassigned:
        raise ValueError(f"parameters without a role: {sorted(unassigned)}")
    overrides = _match_entries(config.groups, list(parameters))
    members: dict[Settings, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        settings = _settings(config, name, parameter, roles[name], overrides.get(name))
        factor = (multipliers or {}).get(settings.optimizer, {}).get(name, 1.0)
        lr, weight_decay = factor * settings.lr, settings.weight_decay / factor
        members[settings._replace(lr=lr, weight_decay=weight_decay)].append(name)
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for settings, names in members.items():
        options = {key: value for key, value in settings._asdict().items() if value is not None}
        group = {"params": [parameters[n] for n in names], "names": names, "peak_lr": settings.lr}
        groups[options.pop("optimizer")].append(options | group)
    optimizers: dict[str, Optimizer] = {}
    if groups["muon"]:
        assert isinstance(config, MuonConfig)
        optimizers["muon"] = Muon(groups["muon"], config, ns_dtype, rounding=rounding)
    if groups["adamw"]:
        adamw = groups["adamw"]
        optimizers["adamw"] = (
            AdamW(adamw, fused=True) if rounding is None else RoundedAdamW(adamw, rounding)
        )
    return optimizers


def settings(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], roles: Mapping[str, str]
) -> dict[str, Settings]:
    """Return the settings that `build` assigns to each parameter, before any multipliers.

    Raise ConfigError as `build` does.
    """
    overrides = _match_entries(config.groups, list(parameters))
    return {
        name: _settings(config, name, parameter, roles[name], overrides.get(name))
        for name, parameter in parameters.items()
    }


def _match_entries(entries: Sequence[AdamWGroup], names: Sequence[str]) -> dict[str, AdamWGroup]:
    """Return the first matching entry for each name that has one.

    Raise ConfigError for an entry that matches no name, or only names of earlier entries.
    """
    found: dict[str, AdamWGroup] = {}
    for entry in entries:
        matching = [name for name in names if fnmatchcase(name, entry.match)]
        unmatched = [name for name in matching if name not in found]
        if not matching:
            close = difflib.get_close_matches(entry.match, names, n=3, cutoff=0.0)
            raise ConfigError(
                f"no parameter has a name that matches {entry.match!r}",
                where="optim.groups",
                next=f"the closest are {', '.join(close)}",
            )
        if not unmatched:
            raise ConfigError(
                f"the entry for {entry.match!r} has no effect",
                where="optim.groups",
                why="earlier entries match all its parameters",
                next="move it before them",
            )
        found |= dict.fromkeys(unmatched, entry)
    return found


def _settings(
    config: OptimConfig, name: str, parameter: nn.Parameter, role: str, entry: AdamWGroup | None
) -> Settings:
    """Return the resolved settings of one parameter."""
    label = role if entry is None else f"{role}: {entry.match}"
    entry = entry or AdamWGroup(match=name)
    if isinstance(config, MuonConfig):
        adamw = config.adamw
        given = entry if isinstance(entry, MuonGroup) else MuonGroup(match=name)
        owner = given.optimizer or ("muon" if role == "matrix" else "adamw")
        if owner == "muon":
            return _muon(config, label, name, parameter, given)
        if given.split is not None:
            raise _invalid_entry(entry, f"AdamW updates {name}, but split is an option of Muon")
    else:
        adamw = config
    return Settings(
        "adamw",
        label,
        lr=_first(entry.lr, adamw.lr),
        weight_decay=_first(entry.weight_decay, config.weight_decay if role == "matrix" else 0.0),
        betas=_first(entry.betas, adamw.betas),
        eps=_first(entry.eps, adamw.eps),
    )


def _muon(
    config: MuonConfig, label: str, name: str, parameter: nn.Parameter, entry: MuonGroup
) -> Settings:
    shape = list(parameter.shape)
    if len(shape) not in (2, 3):
        raise _invalid_entry(
            entry, f"Muon is for matrices and stacks: {name} has the shape {shape}"
        )
    if entry.betas is not None or entry.eps is not None:
        raise _invalid_entry(entry, f"Muon updates {name}, but betas and eps are options of AdamW")
    split, rows = entry.split, shape[-2]
    if isinstance(split, int):
        split = (rows // split,) * split
    if split is not None and sum(split) != rows:
        raise _invalid_entry(entry, f"{name} has {rows} rows, but split has {sum(split)}")
    return Settings(
        "muon",
        label,
        lr=_first(entry.lr, config.lr),
        weight_decay=_first(entry.weight_decay, config.weight_decay),
        split=split,
    )


def _invalid_entry(entry: AdamWGroup, why: str) -> ConfigError:
    return ConfigError(
        f"the entry for {entry.match!r} is invalid for a parameter that it matches",
        where="optim.groups",
        why=why,
        next="narrow the pattern, for example to layers.*.attn.[qkv].weight",
    )


def _first(*values: T | None) -> T:
    """Return the first value that is not None; the last one never is."""
    return next(value for value in values if value is not None)


def describe(optimizers: Mapping[str, Optimizer]) -> str:
    """Return an indented table with a row per group: tensors, parameters and settings."""
    rows = [("group", "optimizer", "tensors", "parameters", "peak lr", "decay", "betas")]
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            betas = group["betas"] if name == "adamw" else (group["momentum"],)
            rows.append(
                (
                    group["label"],
                    name,
                    str(len(group["params"])),
                    f"{sum(p.numel() for p in group['params']):,}",
                    f"{group['peak_lr']:.4g}",
                    f"{group['weight_decay']:.4g}",
                    ", ".join(f"{beta:.4g}" for beta in betas),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    row_format = "".join(f"  {{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(row_format.format(*row) for row in rows)


def set_learning_rate(optimizers: Mapping[str, Optimizer], multiplier: float) -> None:
    """Set the learning rate of every group to `multiplier` times its peak."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = multiplier * group["peak_lr"]
