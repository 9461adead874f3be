"""The table of parameters: parameters of every kind behave as on one process.

They are frozen, without a gradient, replicated, sharded, or on some of the ranks only, where their
gradients are averaged over these ranks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from support.ranks import on_ranks
from support.tables import table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from dtt.config.parallel import Sizes
from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import TensorSlice, from_local, layout_of, local, local_shard, world_size
from dtt.optim import built
from dtt.optim.adamw import AdamWSettings
from dtt.optim.ema import Ema
from dtt.optim.muon.variant import MuonConfig
from dtt.params.table import Param, Params

RANKS, STEPS, LIMIT = 4, 2, 0.5
SHAPES = {
    "everywhere": (6, 4), "frozen": (4, 4), "unused": (3, 4), "sharded": (10, 6),
    "half": (5, 8), "half_sharded": (7, 12), "last": (4, 5), "norm": (5,), "lora": (4, 3),
}  # fmt: skip
ROLES = dict.fromkeys(SHAPES, "matrix") | {"norm": "vector", "lora": "adapter"}
EVERYONE = tuple(range(RANKS))
HOLDERS = dict.fromkeys(SHAPES, EVERYONE) | {"half": (2, 3), "half_sharded": (2, 3), "last": (3,)}
SHARDED = "sharded", "half_sharded"
CONFIG = MuonConfig(
    momentum_warmup=4, normuon_beta2=0.9, adamw=AdamWSettings(lr=0.01), weight_decay=0.1
)


def random(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def make_params(rank: int, everyone: DeviceMesh) -> Params:
    """The parameters that `rank` holds; all ranks call it together."""
    half, last = DeviceMesh("cpu", [2, 3]), DeviceMesh("cpu", [3])
    meshes = {EVERYONE: everyone, (2, 3): half, (3,): last}
    found = []
    for name in reversed(SHAPES):
        full, ranks = random(name, 0), HOLDERS[name]
        if rank not in ranks:
            continue
        if name in SHARDED:
            part = full.chunk(len(ranks))[ranks.index(rank)].clone()
            full = from_local(part, meshes[ranks], [Shard(0)], full.shape)
        tensor = nn.Parameter(full, requires_grad=name != "frozen")
        layout = layout_of(tensor, RANKS if ranks == EVERYONE else meshes[ranks])
        found.append(Param(name, tensor, ROLES[name], layout, len(ranks)))
    return Params(sorted(found, key=lambda p: p.name), Mesh(Sizes(shard=RANKS), rank, everyone))


class Training:
    """Two steps of training; the gradients are those of the global batch."""

    def __init__(self, params: Params) -> None:
        self.params, self.norms = params, list[float]()
        self.optimizers = built.build(CONFIG, params, RunFacts(1))
        self.ema = Ema(params, decay=0.9)

    def train(self) -> None:
        """As a step does after the backward pass."""
        for step in range(1, STEPS + 1):
            for name, param in self.params.items():
                if name in ("frozen", "unused"):
                    continue
                # A loss that is scaled for all ranks, averaged over fewer, is too large.
                excess = world_size() / len(HOLDERS[name]) if world_size() > 1 else 1.0
                p = param.tensor
                p.grad = torch.zeros_like(p)
                local(p.grad).copy_(excess * random(name, step)[local_shard(p).box.slices])
            self.norms.append(float(self.params.clip(LIMIT)))
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            self.ema.update(torch.tensor(0.0))


class OfRank(NamedTuple):
    """What one rank computed."""

    norms: list[float]
    parts: dict[str, tuple[TensorSlice, list[Any]]]
    groups: dict[str, list[str]]
    average: dict[str, list[Any]]


def names_of(optimizers: Mapping[str, Optimizer]) -> dict[str, list[str]]:
    return {
        kind: sorted(name for group in optimizer.param_groups for name in group["names"])
        for kind, optimizer in optimizers.items()
    }


def train(world: World) -> tuple[Any, ...]:
    """Clip, step and average on this rank; the fields of its `OfRank`."""
    torch.set_num_threads(1)
    params = make_params(world.rank, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",)))
    assert set(params) == {name for name in SHAPES if world.rank in HOLDERS[name]}
    assert all(param.layout.ranks == HOLDERS[name] for name, param in params.items())
    training = Training(params)
    training.train()
    parts = {}
    for name, param in params.items():
        part = local_shard(param.tensor)
        parts[name] = part.box, part.local.detach().tolist()
    average = {path: local(tensor).tolist() for path, tensor in training.ema.tensors().items()}
    return training.norms, parts, names_of(training.optimizers), average


@pytest.fixture(scope="module")
def expected() -> Training:
    """One process that holds every parameter."""
    named = {n: nn.Parameter(random(n, 0), requires_grad=n != "frozen") for n in sorted(SHAPES)}
    training = Training(table(named, ROLES))
    training.train()
    return training


@pytest.fixture(scope="module")
def of_ranks() -> list[OfRank]:
    return [OfRank(*fields) for fields in on_ranks(RANKS, train)]


def test_the_gradient_norm_counts_every_parameter_once_on_every_rank(
    of_ranks: list[OfRank], expected: Training
) -> None:
    assert all(rank.norms == of_ranks[0].norms for rank in of_ranks)
    assert of_ranks[0].norms == pytest.approx(expected.norms, rel=1e-6)


def test_each_parameter_is_updated_on_the_ranks_that_hold_it(
    of_ranks: list[OfRank], expected: Training
) -> None:
    for rank, result in enumerate(of_ranks):
        assert set(result.parts) == {name for name in SHAPES if rank in HOLDERS[name]}
        for name, (box, values) in result.parts.items():
            full = expected.params[name].tensor.detach()
            torch.testing.assert_close(torch.tensor(values), full[box.slices], atol=2e-6, rtol=2e-6)
            if name in ("frozen", "unused"):
                assert torch.equal(full, random(name, 0))


def test_frozen_parameters_are_in_no_group_and_in_no_average(
    of_ranks: list[OfRank], expected: Training
) -> None:
    everything = {"adamw": ["lora", "norm"], "muon": sorted({*SHAPES} - {"lora", "norm", "frozen"})}
    assert names_of(expected.optimizers) == everything
    for rank, result in enumerate(of_ranks):
        held = {name for name in SHAPES if rank in HOLDERS[name]}
        assert result.groups == {
            kind: [name for name in names if name in held] for kind, names in everything.items()
        }
        averaged = {f"ema/{name}/value" for name in held - {"frozen"}}
        assert set(result.average) == averaged | {"ema/updates/count"}


def test_a_table_selects_roles_and_what_is_trained(expected: Training) -> None:
    params = expected.params
    assert set(params.subset({"adapter"})) == {"lora"}
    assert set(params.trainable()) == {*SHAPES} - {"frozen"}
    assert params.subset({"adapter"})["lora"] is params["lora"]


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,)])
def test_gradients_of_mixed_dtypes_are_clipped_by_their_norm_in_fp32(
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """The order of the parameters does not matter."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(1000, dtype=dtype)) for dtype in dtypes]
    for p in parameters:
        p.grad = torch.randn(1000, generator=generator).to(p.dtype)
    squares = [float(p.grad.double().square().sum()) for p in parameters if p.grad is not None]
    norm = table(dict(zip("ab", parameters, strict=False)), "vector").clip(1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(sum(squares) ** 0.5, rel=1e-6)
    clipped = [float(p.grad.double().square().sum()) for p in parameters if p.grad is not None]
    assert sum(clipped) ** 0.5 == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_any_gradient_the_norm_is_zero(dtype: torch.dtype) -> None:
    params = table({"a": nn.Parameter(torch.zeros(3, dtype=dtype))}, "vector")
    assert float(params.clip(1.0)) == 0.0
