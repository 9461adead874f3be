"""The model of a run, laid out over its processes, with its first weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dtt.config.run import RunConfig
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.parallel.apply import apply
from dtt.parallel.mesh import Layout, make_layout
from dtt.runtime.dist import World
from dtt.train.plan import Plan


@dataclass(frozen=True)
class Assembled:
    """A model on its devices."""

    layout: Layout
    model: Decoder
    module: nn.Module
    """What is called in training: `model`, or `model` wrapped."""
    parameters: dict[str, nn.Parameter]
    """By their plain names; each rank's part, where they are sharded."""


def assemble(cfg: RunConfig, plan: Plan, world: World) -> Assembled:
    """All ranks together. Where it is sharded, no rank ever holds the whole model."""
    layout = make_layout(plan.sizes, world)
    with torch.device("meta") if layout.sharded else world.device:
        model = Decoder(plan.arch)
    module = apply(
        model,
        world,
        layout,
        compile_blocks=plan.compile,
        precision=plan.precision,
        reshard=cfg.parallel.reshard,
    )
    if layout.sharded:
        model.to_empty(device=world.device)
    initialize(model, cfg.seed, plan.scaling.base)
    return Assembled(layout, model, module, dict(model.named_parameters()))
