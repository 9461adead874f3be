"""Checkpoint back ends with a common interface: dtt's and the usual alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.checkpoint import retention, store
from dtt.checkpoint.saver import Saver
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World

T = TypeVar("T")
State = dict[str, Tensor]


def state_of(step: int) -> State:
    """Return the state after `step`: deterministic and different for each step."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{i}": torch.randn(20 + i, 50, generator=generator) for i in range(4)}
    moments = {f"{name}.moment": weight**2 for name, weight in weights.items()}
    return weights | moments | {"step": torch.tensor([step])}


def shard(state: State, rank: int, size: int) -> State:
    """Return the shard of each tensor on one of `size` ranks, as in FSDP2: uneven, some empty."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    mesh, placements = init_device_mesh("cpu", (size,)), [Shard(0)]
    shards: State = {}
    for name, tensor in state.items():
        shards[name] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    dist.destroy_process_group()  # it carried no messages: saving communicates through the world
    return shards


class Backend(Protocol):
    """A method to save and load checkpoints."""

    @property
    def name(self) -> str:
        """Name in the tables."""

    @property
    def ranks(self) -> int:
        """Number of processes that save together."""

    def save(self, folder: Path, step: int, rank: int = 0, link: Connection | None = None) -> None:
        """Save `state_of(step)` in `folder`; `link` connects to the other rank, if any."""

    def load(self, folder: Path) -> State:
        """Return the newest state accepted as complete; raise if there is none."""

    def files(self, folder: Path, step: int) -> list[Path]:
        """Return the files written for `step`."""


@dataclass(frozen=True)
class LinkedWorld(World):
    """A world of two processes connected by a pipe; no save has to set up a network."""

    link: Connection | None = None

    def exchange(self, value: T) -> list[T]:
        """Return the values of both ranks."""
        if self.link is None:
            return [value]
        self.link.send(value)
        other: T = self.link.recv()
        return [value, other] if self.first else [other, value]


@dataclass(frozen=True)
class Dtt:
    """The back end `dtt.checkpoint`, used as in the trainer."""

    name: str
    ranks: int = 1
    asynchronous: bool = False
    sharded: bool = False
    """True if each rank holds only its shard of every tensor."""

    def save(self, folder: Path, step: int, rank: int = 0, link: Connection | None = None) -> None:
        """Save, verify and prune to the newest two checkpoints."""
        size = 1 if link is None else 2
        world = LinkedWorld(Ranks(rank, size), torch.device("cpu"), None, link=link)
        config = CheckpointConfig(asynchronous=self.asynchronous, keep_last=2)
        facts = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}
        saver = Saver(JobDir(folder), 1, world, config, facts)
        state = state_of(step)
        if self.sharded:
            state = shard(state, rank, size)
        model = {name: t for name, t in state.items() if "." not in name and name != "step"}
        optimizer = {name: t for name, t in state.items() if "." in name}
        rank_state = {f"rng.{rank}": torch.arange(16, dtype=torch.uint8)}
        shared_state = {store.MODEL: model, store.STATE: optimizer}
        saver.begin(step, shared_state, rank_state, {"step": step})
        saver.wait()

    def load(self, folder: Path) -> State:
        """Load the newest verified checkpoint."""
        newest = store.newest(JobDir(folder).checkpoints)
        if newest is None:
            raise FileNotFoundError(folder)
        state = {k: t for k, t in newest.tensors(store.STATE).items() if not k.startswith("rng.")}
        step = torch.tensor([newest.position()["step"]])
        return newest.tensors(store.MODEL) | state | {"step": step}

    def resume(self, folder: Path, step: int) -> None:
        """Start another attempt, which saves `step`."""
        retention.sweep_staging(JobDir(folder).checkpoints)
        self.save(folder, step)

    def files(self, folder: Path, step: int) -> list[Path]:
        """Return all files of the checkpoint."""
        return sorted(store.folder_of(JobDir(folder).checkpoints, step).iterdir())


@dataclass(frozen=True)
class TorchSave:
    """The back end `torch.save`, which overwrites the last file.

    With `rename` it writes a temporary file and renames it.
    """

    name: str
    ranks: int = 1
    rename: bool = False

    def save(self, folder: Path, step: int, rank: int = 0, link: Connection | None = None) -> None:
        """Write one file."""
        path = self.files(folder, step)[0]
        target = path.with_suffix(".tmp") if self.rename else path
        torch.save(state_of(step), target)
        if self.rename:
            target.replace(path)

    def load(self, folder: Path) -> State:
        """Load that file."""
        state: State = torch.load(self.files(folder, 0)[0], weights_only=True)
        return state

    def files(self, folder: Path, step: int) -> list[Path]:
        """Return that file."""
        return [folder / "checkpoint.pt"]


@dataclass(frozen=True)
class Dcp:
    """The back end `torch.distributed.checkpoint`, which overwrites the last save."""

    name: str
    ranks: int = 1

    def save(self, folder: Path, step: int, rank: int = 0, link: Connection | None = None) -> None:
        """Write one folder."""
        save(state_of(step), checkpoint_id=folder / "checkpoint", no_dist=True)

    def load(self, folder: Path) -> State:
        """Load into tensors of the same shapes."""
        state: dict[str, Any] = {k: torch.full_like(t, -1) for k, t in state_of(0).items()}
        load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
        return state

    def files(self, folder: Path, step: int) -> list[Path]:
        """Return all files of the folder."""
        return sorted((folder / "checkpoint").iterdir())


DTT_BACKENDS: tuple[Backend, ...] = (
    Dtt("dtt"),
    Dtt("dtt, asynchronous", asynchronous=True),
    Dtt("dtt, two ranks", ranks=2),
    Dtt("dtt, two ranks, sharded", ranks=2, sharded=True),
)
PEER_BACKENDS: tuple[Backend, ...] = (
    TorchSave("torch.save"),
    TorchSave("torch.save, then rename", rename=True),
    Dcp("torch.distributed.checkpoint"),
)
