"""Muon on meshes of processes: the update of a single one, each matrix orthogonalised once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtt.mesh.dist import World
from dtt.mesh.sharding import from_local, local, local_shard
from dtt.optim.muon.newton_schulz import orthogonalize
from dtt.optim.muon.optimizer import Muon
from dtt.optim.muon.redistribution import Matrix, assign, buckets, matrices
from dtt.optim.muon.variant import MuonConfig

SHAPES = ((16, 8), (7, 12), (12, 7), (8, 24), (5, 3), (8, 2), (3, 8, 16), (2, 12, 8), (24, 8))
"""Of 7 rows over 4 ranks the last has one, of 5 none."""
SPLITS: tuple[tuple[int, ...] | None, ...] = (*(None,) * 7, (8, 4), (15, 5, 4))
STACKS = ((4, 8, 6), (4, 6, 10))
"""Of experts, of which two ranks hold whole ones."""
MATRICES = 6 + 3 + 2 * 2 + 3
EVERYTHING = MuonConfig(
    lr=0.02, momentum_warmup=4, normuon_beta2=0.9, weight_decay={"value": 0.1, "cautious": True},
    scale="spectral",
)  # fmt: skip
CONFIGS = (MuonConfig(lr=0.02), EVERYTHING)
STEPS = 3

State = list[dict[str, Tensor]]


def random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wholes() -> list[Tensor]:
    return [random(shape, i) for i, shape in enumerate(SHAPES)]


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of `whole`, as `parameter` is cut."""
    if not isinstance(parameter, DTensor):
        return whole.clone()
    part = whole[local_shard(parameter).box.slices].clone()
    return from_local(part, parameter.device_mesh, parameter.placements, whole.shape)


def make(params: Sequence[Tensor], config: MuonConfig, dtype: torch.dtype) -> Muon:
    groups = [{"params": [p], "split": s} for p, s in zip(params, SPLITS, strict=True)]
    return Muon(groups, config, dtype)


def step(optimizer: Muon, params: Sequence[Tensor], number: int) -> None:
    for i, p in enumerate(params):
        p.grad = like(p, random(p.shape, 1000 * (number + 1) + i))
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    optimizer.step()


def state_of(optimizer: Muon, params: Sequence[Tensor]) -> State:
    return [{"weight": p.detach()} | optimizer.state[p] for p in params]


def alone(config: MuonConfig, dtype: torch.dtype) -> State:
    params = [nn.Parameter(whole) for whole in wholes()]
    optimizer = make(params, config, dtype)
    for number in range(STEPS):
        step(optimizer, params, number)
    return state_of(optimizer, params)


class Holder(nn.Module):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


def sharded(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    holder = Holder(tensors)
    fully_shard(holder, mesh=mesh)
    return list(holder.parameters())


def ddp() -> list[Tensor]:
    return [nn.Parameter(whole) for whole in wholes()]


def fsdp() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    return sharded(wholes(), mesh)


def hsdp() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(wholes(), mesh)


def cut(mesh: DeviceMesh) -> list[Tensor]:
    """As tensor parallelism would: rows of every other matrix, columns of the rest."""
    dims = [(i % 2) + len(shape) - 2 for i, shape in enumerate(SHAPES)]
    return [
        distribute_tensor(whole, mesh, [Shard(dim)])
        for whole, dim in zip(wholes(), dims, strict=True)
    ]


def tensor() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return [nn.Parameter(part) for part in cut(mesh)]


def fsdp_over_tensor() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return sharded(cut(mesh["tensor"]), mesh["shard"])


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    each.__name__: each for each in (ddp, fsdp, hsdp, tensor, fsdp_over_tensor)
}


def bits(state: State) -> list[bytes]:
    return [local(t).contiguous().numpy().tobytes() for each in state for t in each.values()]


@contextmanager
def counting() -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Number of matrices of each batch orthogonalised, and of elements of each all-to-all.

    Then of those for other ranks.
    """
    done: list[int] = []
    elsewhere: list[int] = []
    sent: list[int] = []
    all_to_all: Any = dist.all_to_all_single

    def counted(whole: Tensor, *how: Any) -> Tensor:
        done.append(len(whole))
        return orthogonalize(whole, *how)

    def recorded(received: Tensor, given: Tensor, *how: Any, **more: Any) -> Any:
        sent.append(given.numel())
        rank = dist.get_rank()
        elsewhere.append(given.numel() - how[1][rank])
        return all_to_all(received, given, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtt.optim.muon.optimizer.orthogonalize", counted)
        patch.setattr(dist, "all_to_all_single", recorded)
        yield done, sent, elsewhere


def trained(
    world: World, layout: str, configs: Sequence[MuonConfig], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """What a rank has after some steps, with one in between that is skipped; by configuration."""
    torch.set_num_threads(1)
    return [train(LAYOUTS[layout](), config, dtype) for config in configs]


def train(params: Sequence[Tensor], config: MuonConfig, dtype: torch.dtype) -> dict[str, Any]:
    optimizer = make(params, config, dtype)
    optimizer.found_inf = torch.zeros(())
    with counting() as (done, sent, _):
        step(optimizer, params, 0)
    before, planned = bits(state_of(optimizer, params)), optimizer._buckets
    optimizer.found_inf = torch.ones(())
    for p in params:
        p.grad = like(p, torch.full(p.shape, torch.nan))
    optimizer.step()
    kept = bits(state_of(optimizer, params)) == before
    optimizer.found_inf = torch.zeros(())
    for number in range(1, STEPS):
        step(optimizer, params, number)
    parts = [
        {name: (local_shard(tensor).box, local(tensor).numpy()) for name, tensor in each.items()}
        for each in state_of(optimizer, params)
    ]
    return {
        "parts": parts,
        "kept": kept,
        "orthogonalized": sum(done),
        "sent": sent,
        "buckets": len(planned),
        "planned once": optimizer._buckets is planned,
        "waited": optimizer.waited_seconds,
    }


def assert_parts_of(expected: State, parts: list[dict[str, Any]], within: float) -> None:
    for whole, part in zip(expected, parts, strict=True):
        assert part.keys() == whole.keys()
        for name, (box, value) in part.items():
            torch.testing.assert_close(
                torch.from_numpy(value), whole[name][box.slices], atol=within, rtol=within
            )


@pytest.mark.slow(except_for=["fsdp-4"])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("tensor", 4), ("fsdp_over_tensor", 4)],
)
def test_on_every_layout_steps_are_those_of_one_process(layout: str, ranks: int) -> None:
    results = on_ranks(ranks, trained, layout, CONFIGS, torch.float32)
    for config, of_ranks in zip(CONFIGS, zip(*results, strict=True), strict=True):
        expected = alone(config, torch.float32)
        for result in of_ranks:
            assert_parts_of(expected, result["parts"], within=2e-6)
            assert result["kept"], "a skipped step changed bits"
            assert result["planned once"]
            assert result["waited"] > 0
        done = [result["orthogonalized"] for result in of_ranks]
        assert sum(done) == MATRICES
        assert min(done) > 0


@pytest.mark.parametrize(("layout", "transfers"), [("ddp", 1), ("fsdp", 2)])
def test_elements_are_sent_in_the_compute_dtype_and_only_where_needed(
    layout: str, transfers: int
) -> None:
    results = on_ranks(2, trained, layout, CONFIGS[:1], torch.bfloat16)
    expected = alone(CONFIGS[0], torch.bfloat16)
    for [result] in results:
        assert_parts_of(expected, result["parts"], within=1e-6)
        assert len(result["sent"]) == transfers * result["buckets"]
    # Each element is sent once to the assigned rank, if it lacks it, and back to all holders.
    assert sum(sum(result["sent"]) for [result] in results) == 2 * sum(map(prod, SHAPES))


def on_whole_experts(_world: World) -> tuple[list[int], list[tuple[Any, Any]]]:
    """Elements that a rank sends in a step on stacks, and its parts of them afterwards."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    params = sharded([random(shape, i) for i, shape in enumerate(STACKS)], mesh)
    for i, p in enumerate(params):
        p.grad = like(p, random(p.shape, 10 + i))
    optimizer = Muon([{"params": params}], MuonConfig(lr=0.02), torch.float32)
    with counting() as (_, _, elsewhere):
        optimizer.step()
    return elsewhere, [(local_shard(p).box, local(p).detach().numpy()) for p in params]


def test_whole_experts_are_updated_where_they_are_each_by_itself() -> None:
    alone = []
    for i, (shape, stack) in enumerate(zip(STACKS, map(random, STACKS, range(2)), strict=True)):
        matrices = [nn.Parameter(matrix) for matrix in stack]
        for matrix, grad in zip(matrices, random(shape, 10 + i), strict=True):
            matrix.grad = grad
        Muon([{"params": matrices}], MuonConfig(lr=0.02), torch.float32).step()
        alone.append(torch.stack([matrix.detach() for matrix in matrices]))
    for sent, parts in on_ranks(2, on_whole_experts):
        assert sum(sent) == 0
        for whole, (box, part) in zip(alone, parts, strict=True):
            torch.testing.assert_close(torch.from_numpy(part), whole[box.slices], atol=1e-6, rtol=0)


def llama(layers: int, dim: int) -> list[Matrix]:
    ffn = 256 * -(-8 * dim // (3 * 256))
    found: list[Matrix] = []
    for shape in [*4 * [(dim, dim)], (ffn, dim), (ffn, dim), (dim, ffn)] * layers:
        found += matrices(torch.empty(shape, device="meta"), 0, None, local_fraction=1.0)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64])
def test_ranks_are_assigned_about_the_same_work(ranks: int) -> None:
    assigned = assign(llama(24, 1024), range(ranks))
    loads = [sum(m.flops for m in assigned if m.assigned_rank == rank) for rank in range(ranks)]
    costliest = max(m.flops for m in assigned)
    least = max(sum(loads) / ranks, costliest)
    assert max(loads) <= 4 / 3 * least
    if ranks <= 16:
        assert max(loads) < 1.06 * sum(loads) / ranks


def test_buckets_are_bounded_and_hold_each_matrix_once() -> None:
    limit = 2**22
    assigned = assign(llama(4, 1024), range(4))
    cut = list(buckets(assigned, 4, limit))
    assert [m for bucket in cut for m in bucket] == assigned
    assert all(sum(m.local_elements for m in bucket) <= limit for bucket in cut)
    assert len(list(buckets(assigned, 4, 2**30))) == 4
    assert len(list(buckets(assign(assigned, [0]), 1, 2**30))) == 1


def test_matrices_larger_than_the_bound_are_orthogonalized_side_by_side() -> None:
    assigned = [m._replace(local_fraction=1 / 8) for m in llama(1, 1024)]
    cut = list(buckets(assign(assigned, range(8)), 8, limit=2**20 - 1))
    assert max(len(bucket) for bucket in cut) >= 4
    for bucket in cut:
        assert len({m.assigned_rank for m in bucket}) == len(bucket)
