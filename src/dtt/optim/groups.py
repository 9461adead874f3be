"""Parameter groups: optimizer, learning rate and decay of each parameter, by role or by name."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from dtt.base.errors import ConfigError
from dtt.config.base import Length
from dtt.config.optim import ROLES, AdamWConfig, AdamWGroup, MuonConfig, MuonGroup, OptimConfig
from dtt.config.schedule import RunFacts
from dtt.config.weight_decay import parse_decay
from dtt.optim import own
from dtt.optim.adamw import make_adamw
from dtt.optim.muon.optimizer import Muon
from dtt.optim.muon.redistribution import Layouts
from dtt.optim.rounding import StochasticRounding
from dtt.params.table import Param, Params

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
    """The decay itself: a horizon is resolved."""
    cautious: bool | None = None
    """True if only weights that the update moves towards zero decay; None: all of them."""
    betas: tuple[float, float] | None = None
    """For AdamW only, like `eps`."""
    eps: float | None = None
    split: tuple[int, ...] | None = None
    """For Muon only: rows of each matrix in the parameter."""
    decay: Length | None = None
    """Own duration of the learning-rate decay; None: that of the schedule."""


def build(
    config: OptimConfig,
    params: Params,
    ns_dtype: torch.dtype,
    multipliers: Mapping[str, Mapping[str, float]] | None = None,
    rounding: StochasticRounding | None = None,
    *,
    steps: int | None = None,
    facts: RunFacts | None = None,
) -> dict[str, Optimizer]:
    """Return the optimizers by name (`muon`, `adamw`); together they hold each parameter once.

    Frozen parameters are in none. With a Muon config, Muon takes those with the role `matrix` and
    AdamW the rest, unless `config.groups` assigns them by name.
    `multipliers` are factors of learning rates, by optimizer and name, 1 if absent; weight decay is
    divided by them, so that each step decays weights by the same amount. `rounding` is for bf16
    parameters and their state; `steps` is the length of the run, for weight decay by horizon.
    Groups carry their parameters' `names`, their `label` and `peak_lr`. Raise ConfigError if an
    entry of `config.groups` does not fit the parameters it matches, and ValueError for a horizon
    without `steps`. An optimizer of a user's own gets `facts` of the run, and holds all parameters.
    """
    if not isinstance(config, AdamWConfig | MuonConfig):
        return own.build(config, trained(params), facts or RunFacts(steps or 1))
    members: dict[tuple[Settings, Any], list[Param]] = defaultdict(list)
    for name, given in settings(config, params, steps).items():
        factor = (multipliers or {}).get(given.optimizer, {}).get(name, 1.0)
        # AdamW and Muon decay by lr * weight_decay. Under muP only the rate changes; the product
        # stays.
        lr, weight_decay = factor * given.lr, given.weight_decay / factor
        # torch's fused AdamW does not take plain tensors and DTensors, or those of two meshes, in
        # one group.
        mesh = getattr(params[name].tensor, "device_mesh", None)
        members[given._replace(lr=lr, weight_decay=weight_decay), mesh].append(params[name])
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for (of_group, _), of_params in members.items():
        # None means that the optimizer has no such option. A key with None would fail in torch.
        options = {key: value for key, value in of_group._asdict().items() if value is not None}
        group = {
            "params": [param.tensor for param in of_params],
            "names": [param.name for param in of_params],
            "peak_lr": of_group.lr,
        }
        groups[options.pop("optimizer")].append(options | group)
    optimizers: dict[str, Optimizer] = {}
    if groups["muon"]:
        assert isinstance(config, MuonConfig)
        layouts: Layouts = {param.tensor: param.layout for param in params.values()}
        optimizers["muon"] = Muon(groups["muon"], config, ns_dtype, rounding, layouts)
    if groups["adamw"]:
        optimizers["adamw"] = make_adamw(groups["adamw"], rounding)
    return optimizers


def settings(config: OptimConfig, params: Params, steps: int | None = None) -> dict[str, Settings]:
    """Return the settings that `build` gives each trainable parameter, before any multipliers.

    Raise the errors of `build`.
    """
    updated = trained(params)
    if not isinstance(config, AdamWConfig | MuonConfig):
        return {
            name: Settings(own.OWN, param.role, config.lr, 0.0) for name, param in updated.items()
        }
    # A rank of a pipeline has some of the parameters. An entry may match those of other ranks, and
    # all ranks must raise the error of one.
    of_ranks = params.mesh.gather({p.name: p.role for p in updated.values()}, ("pipeline",))
    roles = {name: role for of_rank in of_ranks for name, role in of_rank.items()}
    overrides = _match_entries(config.groups, roles)
    found: dict[str, Settings] = {}
    problem: ConfigError | None = None
    try:
        for name, param in updated.items():
            found[name] = _settings(config, param, overrides.get(name), steps)
    except ConfigError as error:
        problem = error
    for theirs in params.mesh.gather(problem, ("pipeline",)):
        if theirs is not None:
            raise theirs
    return found


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


def _settings(
    config: MuonConfig | AdamWConfig, param: Param, entry: AdamWGroup | None, steps: int | None
) -> Settings:
    """Return the resolved settings of one parameter."""
    name, role = param.name, param.role
    label = role if entry is None or entry.match == role else f"{role}: {entry.match}"
    # An entry that matches by name and sets nothing, so that the code below needs no case for None.
    entry = entry or AdamWGroup(match=name)
    if isinstance(config, MuonConfig):
        adamw = config.adamw
        # A plain entry has no Muon options, so it assigns nothing to Muon.
        given = entry if isinstance(entry, MuonGroup) else MuonGroup(match=name)
        owner = given.optimizer or ("muon" if role == "matrix" else "adamw")
        if owner == "muon":
            return _muon(config, label, param, given, steps)
        if given.split is not None:
            raise _invalid_entry(entry, f"AdamW updates {name}, but split is an option of Muon")
    else:
        adamw = config
    lr = _first(entry.lr, adamw.lr)
    general = config.weight_decay if role in ("matrix", "router", "adapter") else 0.0
    decay = general if entry.weight_decay is None else entry.weight_decay
    return Settings(
        "adamw",
        label,
        lr=lr,
        weight_decay=parse_decay(decay).resolve(lr, steps),
        cautious=parse_decay(decay).cautious or None,
        decay=entry.decay,
        betas=_first(entry.betas, adamw.betas),
        eps=_first(entry.eps, adamw.eps),
    )


def _muon(
    config: MuonConfig, label: str, param: Param, entry: MuonGroup, steps: int | None
) -> Settings:
    name, shape = param.name, list(param.layout.shape)
    if len(shape) not in (2, 3):
        raise _invalid_entry(
            entry, f"Muon is for matrices and stacks: {name} has the shape {shape}"
        )
    if entry.betas is not None or entry.eps is not None:
        raise _invalid_entry(entry, f"Muon updates {name}, but betas and eps are options of AdamW")
    split, rows = entry.split, shape[-2]
    # `split: 3` means three equal matrices, as in a fused q, k, v.
    if isinstance(split, int):
        split = (rows // split,) * split
    if split is not None and sum(split) != rows:
        raise _invalid_entry(entry, f"{name} has {rows} rows, but split has {sum(split)}")
    # hyperball fixes the norm of each matrix, so a decay would have no effect.
    if config.scale == "hyperball" and parse_decay(entry.weight_decay or 0.0).value:
        raise _invalid_entry(entry, f"Muon keeps the norm of {name} (optim.scale=hyperball)")
    lr = _first(entry.lr, config.lr)
    decay = config.weight_decay if entry.weight_decay is None else entry.weight_decay
    return Settings(
        "muon",
        label,
        lr=lr,
        weight_decay=parse_decay(decay).resolve(lr, steps),
        cautious=parse_decay(decay).cautious,
        decay=entry.decay,
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


def check_norms(
    optimizers: Mapping[str, Optimizer], gather: Callable[[list[str]], list[list[str]]]
) -> None:
    """Raise ConfigError if Muon's hyperball would have to keep the norm of a matrix of zeros.

    A collective; call it when the initial weights are there. `gather` collects the values of all
    ranks, because some may hold no part of such a matrix.
    """
    muon = optimizers.get("muon")
    if not isinstance(muon, Muon) or not muon.hyperball:
        return
    # Every rank calls `zero_matrices`, a collective, before any of them raises.
    zero = sorted({name for names in gather(muon.zero_matrices()) for name in names})
    if zero:
        raise ConfigError(
            f"optim.scale=hyperball cannot train {zero[0]}",
            where="model.init_std",
            why=f"its initial weights are 0, and hyperball keeps their norm ({len(zero)} such "
            "parameters)",
            next="model.init_std.output=0.01, or optim.groups=[{match: '*.o.weight', "
            "optimizer: adamw}, {match: '*.down.weight', optimizer: adamw}]",
        )


def describe(optimizers: Mapping[str, Optimizer]) -> str:
    """Return an indented table with a row per group: tensors, parameters and settings."""
    rows = [("group", "optimizer", "tensors", "parameters", "peak lr", "decay", "betas")]
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            betas = group["betas"] if name == "adamw" else ()
            if name == "muon":
                betas = (group["momentum"],)
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


def peak_lr(config: OptimConfig, optimizers: Mapping[str, Optimizer]) -> float:
    """Return the peak rate to log: `optim.lr`, or what an own optimizer made its first group."""
    own_one = optimizers.get(own.OWN)
    return config.lr if own_one is None else float(own_one.param_groups[0]["peak_lr"])


def set_learning_rate(
    optimizers: Mapping[str, Optimizer],
    multiplier: float,
    own: Mapping[Length, float] | None = None,
) -> None:
    """Set the learning rate of every group to `multiplier` times its peak.

    `own` are the multipliers of groups with their own decay, by its duration.
    """
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            decay: Length | None = group.get("decay")
            # Without a multiplier of its own, a group follows the schedule.
            of_group = multiplier if decay is None or own is None else own.get(decay, multiplier)
            group["lr"] = of_group * group["peak_lr"]
