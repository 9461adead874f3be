"""Optimizers of a user's own: what the loop and checkpoints need of them, checked and completed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.config import optim as config_optim
from dtt.config.own import OwnCodeError, own_code
from dtt.config.schedule import RunFacts
from dtt.params.table import Params

OWN = "own"
"""Name of such an optimizer, in the paths of its state."""
NUMBER = "#"
"""First character of the name of a state that is a number of Python, not a tensor."""
CHANGING = ("params", "lr")
"""Keys of a group that may change during a run; dtt sets them."""


def build(config: config_optim.Optimizer, params: Params, run: RunFacts) -> dict[str, Optimizer]:
    """Return the optimizer that `config` builds for the trainable parameters, by its name.

    Its groups carry their parameters' `names`, a `label` and `peak_lr`, the rate that they were
    built with. Raises OwnCodeError unless they hold each parameter once.
    """
    with own_code(config, "optim"):
        optimizer = config.build(params, run)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"build returned {optimizer!r}, not a torch.optim.Optimizer")
        by_tensor = {id(param.tensor): param for param in params.values()}
        left = dict(params)
        for group in optimizer.param_groups:
            members = [by_tensor.get(id(tensor)) for tensor in group["params"]]
            held = [param for param in members if param is not None]
            if len(held) < len(members):
                raise ValueError("a group has a tensor that is none of the parameters' `tensor`")
            if not 0 < group["lr"] < math.inf:
                raise ValueError(f"a group has the learning rate {group['lr']}")
            group["names"] = [param.name for param in held]
            group["label"] = ", ".join(sorted({param.role for param in held}))
            group["peak_lr"] = float(group["lr"])
            for param in held:
                del left[param.name]
        if left:
            why = f"{next(iter(left))} and {len(left) - 1} more parameters are in no group"
            raise ValueError(f"{why}: to train a part of the model, use an adapter")
    marked: Any = optimizer
    marked.own_config = config
    marked.own_groups = _constants(optimizer)
    # Of torch: `step` reads `found_inf` on the device, and changes nothing if it is 1.
    marked.skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    return {OWN: optimizer}


def state_per_element(config: config_optim.Optimizer, params: Params) -> float:
    """Return the bytes of state for each element of `params`, which are on torch's device meta."""
    optimizers: dict[str, Optimizer] = {}
    found = 0
    for param in params.values():
        with own_code(config, "optim"):
            stated = config.state_bytes(param)
        if stated is None and not optimizers:
            optimizers = build(config, params, RunFacts(1))
            for one in params.values():
                one.tensor.grad = torch.empty_like(one.tensor)
            with own_code(config, "optim"):
                optimizers[OWN].step()
        if stated is None:
            kept = optimizers[OWN].state[param.tensor].values()
            stated = sum(value.nbytes for value in kept if isinstance(value, Tensor))
        found += stated
    return found / max(1, sum(param.tensor.numel() for param in params.values()))


def _constants(optimizer: Optimizer) -> list[dict[str, str]]:
    groups = optimizer.param_groups
    return [{k: repr(v) for k, v in g.items() if k not in CHANGING} for g in groups]


def skips_itself(optimizer: Optimizer) -> bool:
    """Return True if a step of the optimizer changes nothing where its `found_inf` is 1."""
    return bool(getattr(optimizer, "skips_itself", True))


def saved_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter for a checkpoint; numbers of Python become tensors.

    Raises OwnCodeError for an own optimizer with state that a checkpoint would lose.
    """
    config = getattr(optimizer, "own_config", None)
    if config is None:
        tensors: dict[str, Tensor] = optimizer.state[parameter]
        return tensors
    if _constants(optimizer) != getattr(optimizer, "own_groups", None):
        raise _lost(config, "a group has changed since `build`")
    saved = {}
    for key, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor):
            saved[key] = value
        elif isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            saved[f"{NUMBER}{key}"] = torch.tensor(value, dtype=dtype, device=parameter.device)
        else:
            raise _lost(config, f"state[{key!r}] is a {type(value).__name__}")
    return saved


def check_state(optimizer: Optimizer) -> None:
    """Raise OwnCodeError for an own optimizer with state of something other than a parameter."""
    config = getattr(optimizer, "own_config", None)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    odd = [key for key in optimizer.state if id(key) not in held]
    if config is not None and odd:
        raise _lost(config, f"state[{odd[0]!r}] belongs to no parameter")


def _lost(config: config_optim.Optimizer, why: str) -> OwnCodeError:
    return OwnCodeError(
        "a checkpoint would lose state of your optimizer",
        where=f"optim.type={getattr(config, 'type', '')}",
        why=f"{why}; checkpoints keep tensors and numbers in state[parameter]",
        next="keep it there, for each parameter",
    )


def is_whole(optimizer: Optimizer, key: str) -> bool:
    """Return True if each rank that holds a parameter has this state of it whole."""
    config = getattr(optimizer, "own_config", None)
    return config is not None and key in config.whole_state
