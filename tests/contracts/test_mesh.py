"""The mesh: on 8 ranks, sizes, indices, sums, means and gathers are those of a numpy array."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from support.ranks import on_ranks

from dtt.config.parallel import Sizes
from dtt.mesh.dist import World
from dtt.mesh.mesh import ALL, DATA, Mesh

RANKS = 8
FACTORISATIONS = [
    Sizes(*sizes) for sizes in product((1, 2, 4, 8), repeat=4) if np.prod(sizes) == RANKS
]
VALUES = np.random.default_rng(0).normal(size=(RANKS, 3))


def differences(world: World) -> list[str]:
    """What differs on this rank from numpy."""
    torch.set_num_threads(1)
    wrong = []
    for sizes in FACTORISATIONS:
        mesh = Mesh(sizes, world.rank, world=world)
        place = np.unravel_index(world.rank, sizes)
        # A dimension of size 1 changes nothing: it is in all subsets of one combination.
        large = [dim for dim in ALL if mesh.size(dim) > 1]
        for count in range(len(large) + 1):
            for chosen in combinations(large, count):
                over = tuple(dim for dim in ALL if dim in chosen or mesh.size(dim) == 1)
                axes = tuple(map(ALL.index, over))
                along = tuple(slice(None) if i in axes else place[i] for i in range(len(ALL)))
                expected = VALUES.reshape(*sizes, 3)[along].reshape(-1, 3)
                index = [tuple(row) for row in expected].index(tuple(VALUES[world.rank]))
                value = torch.tensor(VALUES[world.rank])
                right = {
                    "size": mesh.size(*over) == len(expected),
                    "index": mesh.index(*over) == index,
                    "sum": np.allclose(mesh.sum(value.clone(), over), expected.sum(0)),
                    "mean": np.allclose(mesh.mean(value.clone(), over), expected.mean(0)),
                    "gather": mesh.gather(tuple(VALUES[world.rank]), over)
                    == [tuple(row) for row in expected],
                }
                wrong += [f"{sizes} {over}: {what}" for what, same in right.items() if not same]
        if mesh.group("shard") is not mesh.group("shard"):
            wrong.append("a group is made twice")
    return wrong


@pytest.mark.slow
def test_every_factorisation_of_eight_ranks_is_a_numpy_array() -> None:
    assert len(FACTORISATIONS) == 20
    assert on_ranks(RANKS, differences) == [[]] * RANKS


def test_one_process_is_a_mesh_of_ones() -> None:
    mesh = Mesh()
    assert (mesh.size(*ALL), mesh.index(*DATA), mesh.gather("a")) == (1, 0, ["a"])
    assert mesh.mean(torch.tensor(3.0)) == 3.0
    assert not mesh.sharded
