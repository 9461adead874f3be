"""A skipped step changes nothing where every process holds parts of the model."""

from __future__ import annotations

import torch
from support.ranks import on_ranks
from torch import Tensor

from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.mesh.sharding import local
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built
from dtt.optim.ema import Ema
from dtt.optim.muon.variant import MuonConfig
from dtt.parallel.apply import apply
from dtt.train.state import optimizer_tensors


def unchanged(world: World) -> list[bool]:
    """Of three steps, whether each left weights, optimizers and averages as they were."""
    torch.set_num_threads(1)
    layout = make_mesh(Sizes(tensor=2), world)
    cfg = ModelConfig(family="qwen3", dim=32, n_layers=1, n_heads=4, n_kv_heads=2)
    with torch.device("meta"):
        model = Decoder(families.get(cfg.family).architecture(cfg, 96, 16))
    apply(model, world, layout, compile_blocks=False)
    model.to_empty(device=world.device)
    initialize(model, seed=0)
    params = params_of(model, layout)
    config = MuonConfig(normuon_beta2=0.9, momentum_warmup=3)
    optimizers = built.build(config, params, RunFacts(1))
    ema = Ema(params, 0.9)

    def state() -> dict[str, Tensor]:
        tensors = dict(model.named_parameters()) | optimizer_tensors(optimizers) | ema.tensors()
        return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}

    same = []
    for bad in (0.0, 1.0, 0.0):
        model(torch.arange(32).view(2, 16), torch.arange(32).view(2, 16)).loss.backward()
        if bad and world.first:  # one part of one gradient is enough
            local(model.embed.weight.grad).fill_(torch.nan)  # type: ignore[arg-type]
        norm = params.clip(1.0)
        assert norm.isfinite() == (not bad)
        before = state()
        for optimizer in optimizers.values():
            optimizer.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        ema.update(torch.tensor(bad))
        after = state()
        same.append(
            before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in after)
        )
    return same


def test_a_skipped_step_leaves_every_part_as_it_was() -> None:
    assert on_ranks(2, unchanged) == [[False, True, False]] * 2
