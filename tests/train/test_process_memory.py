"""An out-of-memory error lists what to change; other errors are unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import EnvironmentUnfit, ExitCode
from dtt.base.ranks import Ranks
from dtt.config.run import RunConfig
from dtt.config.train import TrainConfig
from dtt.mesh.dist import start
from dtt.train.process_memory import exhaustion_explained, remedies

CFG = RunConfig(train=TrainConfig(micro_batch=6))


def test_a_failed_allocation_lists_what_to_change(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentUnfit) as raised,
        exhaustion_explained(CFG, JobDir(tmp_path), start(Ranks(), "cpu")),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    assert raised.value.exit_code is ExitCode.UNFIT
    message = str(raised.value)
    assert "rank 0 has too little memory" in message
    assert "GB were allocated" in message
    assert "until it fits: train.micro_batch=3; train.remat=full; " in message


def test_a_memory_error_of_python_is_explained_the_same_way(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentUnfit, match="too little memory"),
        exhaustion_explained(CFG, JobDir(tmp_path), start(Ranks(), "cpu")),
    ):
        bytearray(2**60)


def test_other_errors_pass(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        exhaustion_explained(CFG, JobDir(tmp_path), start(Ranks(), "cpu")),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_sharding_is_advised_where_there_are_several_processes() -> None:
    assert "parallel.shard=4" in list(remedies(CFG, 4))
    assert not [advice for advice in remedies(CFG, 1) if advice.startswith("parallel.shard")]
