"""Optimizers as the loop and checkpoints use them: built by their variant, checked and saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.config import optim
from dtt.config.own import OwnCodeError, own_code
from dtt.config.schedule import RunFacts
from dtt.optim.groups import trained
from dtt.params.table import Params

OWN = "own"
"""Name of the optimizer of a variant that names none, in the paths of its state."""
NUMBER = "#"
"""First character of the name of a state that is a number of Python, not a tensor."""
CHANGING = ("params", "lr")
"""Keys of a group that may change during a run; dtt sets them."""


def build(config: optim.Optimizer, params: Params, run: RunFacts) -> dict[str, Optimizer]:
    """Return the optimizers that `config` builds for the trainable parameters, by name.

    Together they hold each once. Their groups carry their parameters' `names`, a `label` and
    `peak_lr`, the rate that they were built with. Raises ConfigError if the keys do not fit the
    parameters, and OwnCodeError for a mistake of `build`.
    """
    params = trained(params)
    with own_code(config, "optim"):
        built = config.build(params, run)
        optimizers = built if isinstance(built, dict) else {OWN: built}
        left = dict(params)
        for optimizer in optimizers.values():
            _complete(optimizer, params, left)
        if left:
            why = f"{next(iter(left))} and {len(left) - 1} more parameters are in no group"
            raise ValueError(f"{why}: to train a part of the model, use an adapter")
    for optimizer in optimizers.values():
        marked: Any = optimizer
        marked.variant, marked.constants = config, _constants(optimizer)
    return optimizers


def _complete(optimizer: Any, params: Params, left: dict[str, Any]) -> None:
    """Check and label the groups of an optimizer; take their parameters from `left`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"build returned {optimizer!r}, not a torch.optim.Optimizer")
    by_tensor = {id(param.tensor): param for param in params.values()}
    for group in optimizer.param_groups:
        members = [by_tensor.get(id(tensor)) for tensor in group["params"]]
        held = [param for param in members if param is not None]
        if len(held) < len(members):
            raise ValueError("a group has a tensor that is none of the parameters' `tensor`")
        if not 0 < group["lr"] < math.inf:
            raise ValueError(f"a group has the learning rate {group['lr']}")
        group["names"] = [param.name for param in held]
        group.setdefault("label", ", ".join(sorted({param.role for param in held})))
        group.setdefault("peak_lr", float(group["lr"]))
        for param in held:
            del left[param.name]


def state_per_element(config: optim.Optimizer, params: Params) -> float:
    """Return the bytes of state for each element of `params`, which are on torch's device meta."""
    optimizers: Mapping[str, Optimizer] = {}
    found = 0
    for param in params.values():
        with own_code(config, "optim"):
            stated = config.state_bytes(param)
        if stated is None and not optimizers:
            optimizers = build(config, params, RunFacts(1))
            for one in params.values():
                one.tensor.grad = torch.empty_like(one.tensor)
            with own_code(config, "optim"):
                for optimizer in optimizers.values():
                    optimizer.step()
        if stated is None:
            kept = [
                v for one in optimizers.values() for v in one.state.get(param.tensor, {}).values()
            ]
            stated = sum(value.nbytes for value in kept if isinstance(value, Tensor))
        found += stated
    return found / max(1, sum(param.tensor.numel() for param in params.values()))


def _constants(optimizer: Optimizer) -> list[dict[str, str]]:
    groups = optimizer.param_groups
    return [{k: repr(v) for k, v in g.items() if k not in CHANGING} for g in groups]


def saved_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state for a checkpoint by `parameter/key`; numbers of Python become tensors.

    Raises OwnCodeError for state that a checkpoint would lose.
    """
    variant = variant_of(optimizer)
    made: Any = optimizer
    if _constants(optimizer) != made.constants:
        raise _lost(variant, "a group has changed since `build`")
    members = named(optimizer)
    odd = [key for key in optimizer.state if id(key) not in {id(p) for _, p in members}]
    if odd:
        raise _lost(variant, f"state[{odd[0]!r}] belongs to no parameter")
    saved = {}
    for name, parameter in members:
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                saved[f"{name}/{key}"] = value
            elif isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                number = torch.tensor(value, dtype=dtype, device=parameter.device)
                saved[f"{name}/{NUMBER}{key}"] = number
            else:
                raise _lost(variant, f"state[{key!r}] is a {type(value).__name__}")
    return saved


def variant_of(optimizer: Any) -> optim.Optimizer:
    """Return the variant that has built an optimizer."""
    variant: optim.Optimizer = optimizer.variant
    return variant


def named(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an optimizer, with their names."""
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["names"], group["params"], strict=True)
    ]


def _lost(variant: optim.Optimizer, why: str) -> OwnCodeError:
    return OwnCodeError(
        "a checkpoint would lose state of your optimizer",
        where=f"optim.type={getattr(variant, 'type', '')}",
        why=f"{why}; checkpoints keep tensors and numbers in state[parameter]",
        next="keep it there, for each parameter",
    )
