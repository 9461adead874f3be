"""Meshes of devices: the sizes that are given, and what they leave."""

from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config.parallel import ParallelConfig, resolve


def test_minus_one_takes_the_remaining_devices() -> None:
    assert resolve(ParallelConfig(tensor=2), 8) == (1, 4, 1, 1, 2)
    assert resolve(ParallelConfig(replicate=2, shard=-1, context=2), 8) == (1, 2, 2, 2, 1)


def test_the_suggested_mesh_fits_the_number_of_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ParallelConfig(tensor=2), 3)
    for change in ("parallel.shard=-1", "parallel.replicate=1", "parallel.tensor=1"):
        assert change in str(caught.value)
    assert resolve(ParallelConfig(shard=-1, replicate=1, tensor=1), 3) == (1, 1, 3, 1, 1)
