"""A model that cannot fit is refused before any of it exists; one that may fit never is.

An out-of-memory error lists what to change; other errors are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base import host_memory
from dtt.base.errors import EnvironmentUnfit, ExitCode
from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.config.parallel import Sizes
from dtt.config.run import RunConfig
from dtt.config.train import TrainConfig
from dtt.mesh.dist import World, start
from dtt.model import count
from dtt.model.scaling import scaled
from dtt.train.precision import Precision
from dtt.train.process_memory import check_memory, exhaustion_explained, remedies

WHOLE = Sizes()
ALONE = World(Ranks(), torch.device("cpu"), None)


def check(
    share: float,
    *arguments: str,
    world: World = ALONE,
    sizes: Sizes = WHOLE,
    precision: Precision = Precision.FP32,
    copies: int = 4,
) -> None:
    """Check a model whose weights, gradients and optimizer state take a share of all memory."""
    cfg = resolve(None, ["model.dim=1024", "optim.type=adamw", *arguments], env={}).config
    arch = scaled(cfg, 64).arch
    fixed = count.parameters(replace(arch, vocab_size=0))
    weights = share * host_memory.total(swap=True) / (precision.weights.itemsize * copies)
    rows = (weights - fixed) / (2 * arch.dim)
    check_memory(cfg, replace(arch, vocab_size=int(rows)), sizes, precision, world)


def test_the_limit_is_all_memory_of_the_machine() -> None:
    check(0.99)
    with pytest.raises(EnvironmentUnfit) as error:
        check(1.01)
    text = str(error.value)
    assert "does not fit into the memory of this machine" in text
    assert f"there are {host_memory.total(swap=True) / 1e9:,.0f} GB" in text
    assert "model.dim, model.n_layers" in text


LORA = ("adapter.type=lora", "adapter.rank=1", "init.from=jobs/base")
TWO = World(Ranks(size=2, local_size=2), torch.device("cpu"), None)
APART = World(Ranks(size=8, local_size=1), torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("share", "arguments", "how"),
    [
        (1.0, ("optim.type=muon",), {"copies": 3}),
        (1.0, (), {"precision": Precision.PURE_BF16}),
        (1.0, LORA, {"copies": 1}),
        (0.5, (), {"world": TWO, "sizes": Sizes(replicate=2)}),
        (1.0, (), {"world": TWO, "sizes": Sizes(shard=2)}),
        (1.0, (), {"world": TWO, "sizes": Sizes(tensor=2)}),
        (8.0, (), {"world": APART, "sizes": Sizes(shard=8)}),
    ],
    ids=["muon", "bf16 weights", "frozen weights", "replicas", "shards", "tensor", "8 machines"],
)
def test_the_largest_model_that_fits(share: float, arguments: tuple[str, ...], how: Any) -> None:
    """Muon keeps one number per weight; frozen weights have no gradients and no state."""
    check(0.95 * share, *arguments, **how)
    with pytest.raises(EnvironmentUnfit):
        check(1.05 * share, *arguments, **how)


def test_the_limits_of_all_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are those that Linux has in a job of Slurm, in a folder of their own."""
    cgroup = tmp_path / "sys/fs/cgroup/job_7"
    cgroup.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7/step_0\n")
    everything = host_memory.total()
    monkeypatch.setattr(host_memory, "Path", lambda name: tmp_path / name.lstrip("/"))
    (cgroup / "memory.max").write_text("max\n")
    assert host_memory.total() >= everything
    (cgroup / "memory.max").write_text(f"{10**9}\n")
    (cgroup / "memory.current").write_text(f"{4 * 10**8}\n")
    assert host_memory.free() == 6 * 10**8
    assert host_memory.total() == 10**9
    inner = cgroup / "step_0"
    inner.mkdir()
    (inner / "memory.max").write_text(f"{5 * 10**8}\n")
    (inner / "memory.current").write_text(f"{10**8}\n")
    assert host_memory.free() == 4 * 10**8
    assert host_memory.total() == 5 * 10**8


# ---- when memory runs out ------------------------------------------------------------------------

CFG = RunConfig(train=TrainConfig(micro_batch=6))


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(2**60, dtype=torch.uint8), lambda: bytearray(2**60)]
)
def test_a_failed_allocation_lists_what_to_change(
    tmp_path: Path, allocate: Callable[[], object]
) -> None:
    with (
        pytest.raises(EnvironmentUnfit) as raised,
        exhaustion_explained(CFG, JobDir(tmp_path), start(Ranks(), "cpu")),
    ):
        allocate()
    assert raised.value.exit_code is ExitCode.UNFIT
    message = str(raised.value)
    assert "rank 0 has too little memory" in message
    assert "GB were allocated" in message
    assert "until it fits: train.micro_batch=3; train.remat=full; " in message


def test_other_errors_pass(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        exhaustion_explained(CFG, JobDir(tmp_path), start(Ranks(), "cpu")),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_sharding_is_advised_where_there_are_several_processes() -> None:
    assert "parallel.shard=4" in list(remedies(CFG, 4))
    assert not [advice for advice in remedies(CFG, 1) if advice.startswith("parallel.shard")]
