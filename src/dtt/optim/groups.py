"""Which optimizer takes which parameter, by its role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dtt.config.optim import AdamWConfig, MuonConfig, OptimConfig
from dtt.optim.muon import Muon

DECAYED = frozenset({"matrix"})


def build(
    config: OptimConfig,
    parameters: Mapping[str, nn.Parameter],
    roles: Mapping[str, str],
    ns_dtype: torch.dtype,
) -> dict[str, Optimizer]:
    """The optimizers by name (`muon`, `adamw`); together they hold each parameter exactly once.

    `roles` must name every parameter: matrix | embed | head | vector. Under Muon the matrices are
    Muon's, the rest AdamW's. Only matrices are decayed. Groups carry their parameters' `names`.
    """
    unassigned = parameters.keys() - roles.keys()
    if unassigned:
        raise ValueError(f"parameters without a role: {sorted(unassigned)}")
    match config:
        case AdamWConfig():
            return {"adamw": _adamw(config, parameters, roles)}
        case MuonConfig():
            matrices = {n: p for n, p in parameters.items() if roles[n] == "matrix"}
            rest = {n: p for n, p in parameters.items() if roles[n] != "matrix"}
            muon = Muon(
                [_group(matrices, config.weight_decay)],
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                weight_decay=config.weight_decay,
                ns_dtype=ns_dtype,
            )
            return {"muon": _remember_peak(muon), "adamw": _adamw(config.adamw, rest, roles)}
        case _:
            assert_never(config)


def _adamw(
    config: AdamWConfig, parameters: Mapping[str, nn.Parameter], roles: Mapping[str, str]
) -> Optimizer:
    decayed = {n: p for n, p in parameters.items() if roles[n] in DECAYED}
    others = {n: p for n, p in parameters.items() if roles[n] not in DECAYED}
    groups = [_group(decayed, config.weight_decay), _group(others, 0.0)]
    return _remember_peak(
        AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
    )


def _group(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> dict[str, object]:
    return {
        "params": list(parameters.values()),
        "names": list(parameters),
        "weight_decay": weight_decay,
    }


def _remember_peak(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizers: Mapping[str, Optimizer], multiplier: float) -> None:
    """Give every group `multiplier` times its peak rate."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = multiplier * group["peak_lr"]
