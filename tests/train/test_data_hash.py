"""Every rank trains on the same data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import on_ranks

from dtt.base.errors import DamagedError
from dtt.mesh.dist import World
from dtt.train.state import check_nodes


def opened_on_two_nodes(world: World, other: str) -> str:
    dataset: Any = SimpleNamespace(manifest=SimpleNamespace(key=other if world.rank else "a"))
    try:
        check_nodes(dataset, world)
    except DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", ["a", "b"])
def test_other_data_on_the_disk_of_one_node_ends_the_run_on_all(other: str) -> None:
    for said in on_ranks(2, opened_on_two_nodes, other):
        assert ("the nodes of this run do not have the same data" in said) == (other != "a")
