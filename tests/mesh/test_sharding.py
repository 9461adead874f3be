"""The layout of a tensor: which ranks hold which part."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from dtt.mesh.sharding import TensorLayout, TensorSlice, layout_of


def test_all_ranks_hold_all_of_a_plain_tensor() -> None:
    layout = layout_of(torch.zeros(3, 2), 4)
    assert layout.ranks == layout.replica_ranks(2) == (0, 1, 2, 3)
    assert set(layout.boxes.values()) == {TensorSlice((0, 0), (3, 2))}
    assert layout.replica_count == 4
    assert layout.largest_fraction == 1.0


def test_a_layout_names_the_ranks_of_each_shard_and_replica() -> None:
    layout = TensorLayout((5, 4), (2, 2), (4, 5, 6, 7), (Replicate(), Shard(0)))
    top, bottom = TensorSlice((0, 0), (3, 4)), TensorSlice((3, 0), (2, 4))
    assert layout.boxes == {4: top, 5: bottom, 6: top, 7: bottom}
    assert layout.replicas == {4: (0,), 5: (0,), 6: (1,), 7: (1,)}
    assert layout.replica_ranks(5) == (5, 7)
    assert layout.replica_count == 2
    assert layout.largest_fraction == 12 / 20
