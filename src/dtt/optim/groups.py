"""Parameter groups: optimizer, learning rate and decay of each parameter, by role or by name."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch.optim import Optimizer

from dtt.base.errors import ConfigError
from dtt.config import optim
from dtt.config.optim import ROLES, AdamWGroup, GroupedOptimizer
from dtt.config.schedule import RunFacts
from dtt.config.value_types import parse_decay
from dtt.params.table import Param, Params


class Settings(NamedTuple):
    """Optimizer settings of a parameter; parameters with equal settings form a group."""

    optimizer: str
    """Name of the optimizer: `muon` or `adamw`."""
    lr: float
    """Learning rate at the peak of the schedule."""
    weight_decay: float
    """The decay itself: a horizon is resolved."""
    label: str = ""
    """The role, followed by the pattern of the `optim.groups` entry that applies, if any."""
    cautious: bool | None = None
    """True if only weights that the update moves towards zero decay; None: all of them."""
    betas: tuple[float, float] | None = None
    """For AdamW only, like `eps`."""
    eps: float | None = None
    split: tuple[int, ...] | None = None
    """For Muon only: rows of each matrix in the parameter."""


def grouped(
    config: GroupedOptimizer, params: Params, run: RunFacts
) -> dict[str, list[dict[str, Any]]]:
    """Return the parameter groups of each optimizer, by its name.

    Groups carry their parameters' `names`, their `label` and `peak_lr`. Raise ConfigError if an
    entry of `config.groups` does not fit the parameters it matches.
    """
    members: dict[tuple[Settings, Any], list[Param]] = defaultdict(list)
    for name, given in settings(config, params, run).items():
        # torch's fused AdamW does not take plain tensors and DTensors, or those of two meshes, in
        # one group.
        mesh = getattr(params[name].tensor, "device_mesh", None)
        members[given, mesh].append(params[name])
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (of_group, _), of_params in members.items():
        # None means that the optimizer has no such option. A key with None would fail in torch.
        options = {key: value for key, value in of_group._asdict().items() if value is not None}
        group = {
            "params": [param.tensor for param in of_params],
            "names": [param.name for param in of_params],
            "peak_lr": of_group.lr,
        }
        groups[options.pop("optimizer")].append(options | group)
    return dict(groups)


def settings(config: GroupedOptimizer, params: Params, run: RunFacts) -> dict[str, Settings]:
    """Return the settings of each of the `trained` parameters; raise the errors of `grouped`."""
    # A rank of a pipeline has some of the parameters. An entry may match those of other ranks, and
    # all ranks must raise the error of one.
    of_ranks = params.mesh.gather({p.name: p.role for p in params.values()}, ("pipeline",))
    roles = {name: role for of_rank in of_ranks for name, role in of_rank.items()}
    overrides = _match_entries(config.groups, roles)
    found: dict[str, Settings] = {}
    problem: ConfigError | None = None
    try:
        for name, param in params.items():
            entry = overrides.get(name)
            label = param.role
            if entry is not None and entry.match != label:
                label += f": {entry.match}"
            found[name] = config.settings_of(param, entry, run)._replace(label=label)
    except ConfigError as error:
        problem = error
    for theirs in params.mesh.gather(problem, ("pipeline",)):
        if theirs is not None:
            raise theirs
    return found


def rate_and_decay(
    lr: float, weight_decay: float | Mapping[str, Any], param: Param, power: float, run: RunFacts
) -> tuple[float, float, bool]:
    """Return the learning rate of a parameter, its weight decay, and True if it is cautious.

    `lr` is that before muP, which shrinks rates of matrices by the width to the power of `power`.
    """
    factor, decay = run.lr_factor(param, power), parse_decay(weight_decay)
    # Each step decays weights by lr * weight_decay. Under muP only the rate changes; the product
    # stays.
    return factor * lr, decay.resolve(lr, run.steps) / factor, decay.cautious


def trained(params: Params) -> Params:
    """Return the parameters that an optimizer updates."""
    # The correction of a router follows the load of its experts: see `dtt.train.expert_load`.
    updated = (param for param in params.trainable().values() if param.role != "balance")
    return Params(updated, params.mesh)


def _match_entries(
    entries: Sequence[AdamWGroup], roles: Mapping[str, str]
) -> dict[str, AdamWGroup]:
    """Return the first matching entry for each parameter that has one, by name.

    `roles` are those of all parameters, by name. Raise ConfigError for an entry that matches no
    name, or only names of earlier entries.
    """
    names = list(roles)
    found: dict[str, AdamWGroup] = {}
    for entry in entries:
        # Roles come first: `head` is the head, not a parameter that happens to match a pattern.
        by_role = entry.match in ROLES  # no parameter has such a name
        matching = [
            name
            for name, role in roles.items()
            if (role == entry.match if by_role else fnmatchcase(name, entry.match))
        ]
        unmatched = [name for name in matching if name not in found]
        if not matching:
            close = difflib.get_close_matches(entry.match, names, n=3, cutoff=0.0)
            if by_role:
                raise ConfigError(
                    f"no parameter has the role {entry.match}",
                    where="optim.groups",
                    why="a head that is tied to the embedding has the role embed",
                    next="delete the entry",
                )
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


def invalid_entry(entry: AdamWGroup, why: str) -> ConfigError:
    """Return the error of an entry of `optim.groups` that does not fit a parameter."""
    return ConfigError(
        f"the entry for {entry.match!r} is invalid for a parameter that it matches",
        where="optim.groups",
        why=why,
        next="narrow the pattern, for example to layers.*.attn.[qkv].weight",
    )


def describe(optimizers: Mapping[str, Optimizer]) -> str:
    """Return an indented table with a row per group: tensors, parameters and settings."""
    rows = [("group", "optimizer", "tensors", "parameters", "peak lr", "decay", "betas")]
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            betas = group.get("betas", group.get("momentum", ()))
            rows.append(
                (
                    group["label"],
                    name,
                    str(len(group["params"])),
                    f"{sum(p.numel() for p in group['params']):,}",
                    f"{group['peak_lr']:.4g}",
                    ("cautious " if group.get("cautious") else "")
                    + f"{group.get('weight_decay', 0.0):.4g}",
                    ", ".join(
                        f"{beta:.4g}" for beta in (betas if isinstance(betas, tuple) else (betas,))
                    ),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    row_format = "".join(f"  {{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(row_format.format(*row) for row in rows)


def peak_lr(config: optim.Optimizer, optimizers: Mapping[str, Optimizer]) -> float:
    """Return the peak rate to log: `optim.lr`, unless `build` made the first group another one."""
    if isinstance(config, GroupedOptimizer):  # its groups may have rates of their own
        return config.lr
    first = next(iter(optimizers.values()))
    return float(first.param_groups[0]["peak_lr"])


def set_learning_rate(optimizers: Mapping[str, Optimizer], multiplier: float) -> None:
    """Set the learning rate of every group to `multiplier` times its peak."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = multiplier * group["peak_lr"]
