"""Mistakes to plant into dtt: each costs time on a GPU, without an error there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

LOSSES = "dtt.model.contract:Model.losses"


class Fault(NamedTuple):
    """A mistake in the results of a function."""

    kind: str
    """What the check must find: the beginning of a finding."""
    place: str
    """The function, as `module:name`."""
    spoil: Callable[[Tensor], Any]
    """Function of a floating-point tensor among the function's results."""
    case: str = "llama"
    """Name of the case whose step calls the function."""


# Fake tensors have no numbers: reading one raises an error, which the check reports as a finding.
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.detach().sum().item(),
    "bool": lambda x: bool(x.detach().isnan().any()),
    "tolist": lambda x: x.detach().flatten()[:2].tolist(),
    "cpu": lambda x: x.detach().cpu(),
    "mask": lambda x: x.detach()[x.detach() > 0],
    "list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "number": lambda x: torch.tensor(1.0, device=x.device),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x.detach().flatten()[:2] + torch.zeros(2),
    "where": lambda x: torch.where(torch.ones(2) > 0, x.detach().flatten()[:2], 0.0),
}
WIDE: dict[str, Callable[[Tensor], Any]] = {
    "double": lambda x: x.detach().double(),
    "ones": lambda x: x.detach().sum() * torch.ones((), dtype=torch.float64, device=x.device),
}
BREAKS: dict[str, Callable[[Tensor], Any]] = {
    "print": lambda x: print(end=""),
    "branch": lambda x: torch.zeros(1) if x.sum() > 0 else None,
    "item": lambda x: float(x.detach().sum().item()),
}

FAULTS = {
    **{
        f"host-{way}-in-{name}": Fault("host waits", place, WAITS[way], case)
        for name, place, case, ways in (
            ("loss", LOSSES, "llama", ("item", "cpu")),
            ("clipping", "dtt.params.table:Params.clip", "fsdp2", ("bool", "tolist")),
            ("mean", "dtt.mesh.mesh:Mesh.mean", "llama", ("item", "mask", "list", "number")),
            ("positions", "dtt.model.decoder:rotations", "documents", ("list", "cpu")),
            ("momentum", "dtt.optim.muon.optimizer:Muon._averaged", "muon", ("bool", "mask")),
            ("update", "dtt.optim.muon.optimizer:orthogonalize", "fsdp2", ("item", "cpu")),
        )
        for way in ways
    },
    **{
        f"mixed-{way}-in-{name}": Fault("mixed devices", place, MIXED[way], case)
        for name, place, case, ways in (
            ("loss", LOSSES, "gpt2", ("add", "where")),
            ("mean", "dtt.mesh.mesh:Mesh.mean", "fsdp2", ("add",)),
            ("clipping", "dtt.params.table:Params.clip", "llama", ("add", "where")),
            ("update", "dtt.optim.muon.optimizer:orthogonalize", "muon", ("add",)),
        )
        for way in ways
    },
    **{
        f"float64-{way}-in-{name}": Fault("float64", place, WIDE[way], case)
        for name, place, case, ways in (
            ("loss", LOSSES, "llama", ("double", "ones")),
            ("positions", "dtt.model.decoder:rotations", "documents", ("double",)),
            ("clipping", "dtt.params.table:Params.clip", "gpt2", ("ones",)),
            ("update", "dtt.optim.muon.optimizer:orthogonalize", "muon", ("double",)),
        )
        for way in ways
    },
    **{
        f"break-{way}-in-{name}": Fault("graph break", place, BREAKS[way], case)
        for name, place, case, ways in (
            ("block", "dtt.model.layers:Block.add", "llama", ("print", "branch", "item")),
            ("mlp", "dtt.model.layers:GatedMLP.forward", "fsdp2", ("print", "branch")),
            ("gelu", "dtt.model.layers:GeluMLP.forward", "gpt2", ("item",)),
            ("norm", "dtt.model.layers:RMSNorm.forward", "llama", ("print", "item")),
        )
        for way in ways
    },
}


def planted(fault: Fault) -> Any:
    """Return a context in which dtt has the mistake."""
    module, _, name = fault.place.partition(":")
    *outer, last = name.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    right = getattr(owner, last)

    @functools.wraps(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        out = right(*arguments, **named)
        first = out if isinstance(out, Tensor) else out[0]
        fault.spoil(first)
        return out

    return patch.object(owner, last, wrong)
