"""Parameters that only some of the ranks hold: clipping, Muon and checkpoints handle them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.config.optim import MuonConfig
from dtt.config.parallel import Sizes
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World
from dtt.mesh.mesh import Layout
from dtt.mesh.sharding import Box, from_local, layout_of, local, local_shard
from dtt.optim.muon.optimizer import Muon
from dtt.parallel.apply import clip_gradients
from dtt.train.state import load_optimizers, load_parameters, optimizer_tensors, rng_tensors

RANKS, STEPS, LIMIT = 3, 2, 0.5
SHAPES = {"everywhere": (6, 4), "last": (5, 8), "last_two": (7, 12), "sharded": (10, 6)}
HOLDERS = {"everywhere": (0, 1, 2), "last": (2,), "last_two": (1, 2), "sharded": (0, 1, 2)}
CONFIG = MuonConfig(momentum_warmup=4, normuon_beta2=0.9)
FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}


def random(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def make_parameters(rank: int, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """The parameters that `rank` holds; all ranks call it together."""
    meshes = {
        "sharded": mesh,
        "last_two": DeviceMesh("cpu", [1, 2]),
        "last": DeviceMesh("cpu", [2]),
    }
    parameters = {"everywhere": nn.Parameter(random("everywhere", 0))}
    for name, held_on in meshes.items():
        if rank in HOLDERS[name]:
            full, ranks = random(name, 0), HOLDERS[name]
            part = full.chunk(len(ranks))[ranks.index(rank)].clone()
            placement = Shard(0) if len(ranks) > 1 else Replicate()
            parameters[name] = nn.Parameter(from_local(part, held_on, [placement], full.shape))
    return dict(sorted(parameters.items()))


def make_muon(parameters: Mapping[str, nn.Parameter]) -> Muon:
    group = {"params": list(parameters.values()), "names": list(parameters)}
    return Muon([group], CONFIG, torch.float32)


class OfRank(NamedTuple):
    """What one rank computed."""

    norms: list[float]
    parts: dict[str, tuple[Box, list[list[float]]]]
    mean: float


def train_and_save(world: World, folder: Path) -> tuple[Any, ...]:
    """Clip, step and save on this rank; the fields of its `OfRank`."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    layout = Layout(Sizes(shard=RANKS), world.rank, mesh)
    parameters = make_parameters(world.rank, mesh)
    assert [n for n in SHAPES if world.rank in HOLDERS[n]] == list(parameters)
    assert all(layout_of(p).ranks == HOLDERS[name] for name, p in parameters.items())
    optimizer, norms = make_muon(parameters), []
    for step in range(STEPS):
        for name, p in parameters.items():
            p.grad = torch.zeros_like(p)
            local(p.grad).copy_(random(name, step + 1)[local_shard(p).box.slices])
        norms.append(float(clip_gradients(layout, list(parameters.values()), LIMIT)))
        optimizer.step()
    job = JobDir(folder)
    if world.first:
        job.checkpoints.mkdir(parents=True)
    world.barrier()
    saver = Saver(job, 1, world, CheckpointConfig(), FACTS)
    shared = {store.MODEL: parameters, store.STATE: optimizer_tensors({"muon": optimizer})}
    saver.begin(1, shared, rng_tensors(world.rank, world.device), {"step": 1})
    saver.wait()
    parts = {
        name: (local_shard(p).box, local(p).detach().tolist()) for name, p in parameters.items()
    }
    return norms, parts, float(layout.mean(torch.tensor(float(world.rank))))


class Expected(NamedTuple):
    """What one process that holds every parameter computes."""

    norms: list[float]
    parameters: dict[str, nn.Parameter]
    optimizer: Muon


@pytest.fixture(scope="module")
def expected() -> Expected:
    parameters = {name: nn.Parameter(random(name, 0)) for name in SHAPES}
    optimizer, norms = make_muon(parameters), []
    for step in range(STEPS):
        for name, p in parameters.items():
            p.grad = random(name, step + 1)
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), LIMIT)))
        optimizer.step()
    return Expected(norms, parameters, optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partial") / "job"


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> list[OfRank]:
    return [OfRank(*fields) for fields in on_ranks(RANKS, train_and_save, folder)]


def test_the_gradient_norm_counts_every_parameter_once_on_every_rank(
    of_ranks: list[OfRank], expected: Expected
) -> None:
    assert of_ranks[0].norms == of_ranks[1].norms == of_ranks[2].norms
    assert of_ranks[0].norms == pytest.approx(expected.norms, rel=1e-6)
    assert [rank.mean for rank in of_ranks] == [1.0] * RANKS


def test_muon_updates_each_parameter_on_the_ranks_that_hold_it(
    of_ranks: list[OfRank], expected: Expected
) -> None:
    for rank, result in enumerate(of_ranks):
        assert set(result.parts) == {name for name in SHAPES if rank in HOLDERS[name]}
        for name, (box, values) in result.parts.items():
            part = expected.parameters[name].detach()[box.slices]
            torch.testing.assert_close(torch.tensor(values), part, atol=2e-6, rtol=2e-6)


def test_the_checkpoint_is_complete_and_loads_on_one_rank(
    of_ranks: list[OfRank], expected: Expected, folder: Path
) -> None:
    found = store.at_step(JobDir(folder).checkpoints, 1)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    load_parameters(parameters, found.stored(store.MODEL))
    for result in of_ranks:
        for name, (box, values) in result.parts.items():
            assert parameters[name].detach()[box.slices].tolist() == values
    optimizer = make_muon(parameters)
    load_optimizers({"muon": optimizer}, found.stored(store.STATE))
    for name, p in parameters.items():
        state, right = optimizer.state[p], expected.optimizer.state[expected.parameters[name]]
        assert state.keys() == right.keys()
        for key, value in right.items():
            torch.testing.assert_close(state[key], value, atol=2e-6, rtol=2e-6)
