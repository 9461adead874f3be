"""Measure the cost of a checkpoint to training: dtt, torch.save and DCP, in interleaved rounds.

    python benchmarks/checkpointing.py [ROUNDS] [FOLDER]

A GPT-2 124M with AdamW (fp32 weights and optimizer state, as dtt trains them) takes small steps on
the CPU; each method saves once per round. `blocked`: time for which the call blocked training.
`next step`: relative slowdown of the following step against the median step without a save. `cost`:
extra time of the round, including the wait for the end of the save, against a round of the same
number of steps without a save. torch.save and DCP neither hash nor verify the checkpoint, nor keep
the previous one; dtt does. `faults.py` injects faults into saves with the same methods.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from measurement import Table, column_medians, in_turns
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.checkpoint import retention, store
from dtt.checkpoint.saver import Saver
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.schedule import RunFacts
from dtt.config.train import CheckpointConfig
from dtt.mesh import dist as dtt_dist
from dtt.mesh.dist import World
from dtt.mesh.sharding import Placed, TensorLayout, on_every_rank, on_this_rank
from dtt.model import families
from dtt.model.architecture import fit_context, fit_vocabulary
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built
from dtt.train.state import optimizer_tensors, rng_tensors

CPU = torch.device("cpu")
STEPS = 2
TOKENS = (1, 128)
FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}
T = TypeVar("T")
State = dict[str, Tensor]
Wait = Callable[[], Any]

# ---- the methods, on a small state ---------------------------------------------------------------


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
        world = LinkedWorld(Ranks(rank, size), CPU, None, link=link)
        config = CheckpointConfig(asynchronous=self.asynchronous, keep_last=2)
        saver = Saver(JobDir(folder), 1, world, config, FACTS)
        state = state_of(step)
        if self.sharded:
            state = shard(state, rank, size)
        model = {name: t for name, t in state.items() if "." not in name and name != "step"}
        optimizer = {name: t for name, t in state.items() if "." in name}
        rank_state = {f"rng.{rank}": torch.arange(16, dtype=torch.uint8)}
        # Not on_this_rank, which asks the process group: there is none.
        alone = (1,), (rank,), (Replicate(),)
        own = {n: Placed(t, TensorLayout(tuple(t.shape), *alone)) for n, t in rank_state.items()}
        both = on_every_rank(optimizer, size) | own
        saver.begin(step, on_every_rank(model, size), both, {"step": step})
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


# ---- their cost to training ----------------------------------------------------------------------


class Run:
    """A model in training; `state` returns the tensors of its checkpoint."""

    def __init__(self) -> None:
        cfg = resolve(None, ["optim.type=adamw"]).config
        sizes = resolve("models/gpt2-124m").config.model
        assert isinstance(sizes, ModelConfig)
        arch = families.get(sizes.family).architecture(
            sizes, fit_vocabulary(sizes, 50257), fit_context(sizes, TOKENS[1])
        )
        self.model = Decoder(arch)
        initialize(self.model, 0)
        self.optimizers = built.build(
            cfg.optim, params_of(self.model), RunFacts(1, dtype=torch.bfloat16)
        )

    def step(self) -> float:
        """Take one optimizer step and return its seconds."""
        # These import pyarrow, which starts a thread; faults.py imports this file and then forks.
        from dtt.data.samples.loader import MicroBatch
        from dtt.train.objectives.loss_function import loss_function
        from dtt.train.step import Passes, update

        start = time.perf_counter()
        ids = torch.randint(50257, (TOKENS[0], TOKENS[1] + 1))
        micro_batch = MicroBatch(ids[:, :-1], ids[:, 1:], None)
        targets = micro_batch.targets.numel()
        Passes(self.model, "bf16").run([micro_batch], loss_function(), targets)
        update(self.optimizers, torch.zeros(()), step=0)
        return time.perf_counter() - start

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return all tensors of a checkpoint, by kind and name."""
        weights = dict(self.model.state_dict())
        return {store.MODEL: weights, store.STATE: optimizer_tensors(self.optimizers)}


def save_methods(run: Run, folder: Path) -> dict[str, Callable[[int], Wait]]:
    """Return the save methods by name.

    Each starts a save of step n and returns a function that waits for its end.
    """
    world = dtt_dist.start(Ranks(), "cpu")

    def dtt_save(asynchronous: bool) -> Callable[[int], Wait]:
        job = JobDir(folder / f"dtt-{asynchronous}")
        job.checkpoints.mkdir(parents=True)
        config = CheckpointConfig(asynchronous=asynchronous, keep_last=1)
        saver = Saver(job, 1, world, config, FACTS)

        def begin(n: int) -> Wait:
            weights, state = (on_every_rank(named) for named in run.state().values())
            saver.begin(n, weights, state | on_this_rank(rng_tensors(0, CPU)), {"step": n})
            return saver.wait

        return begin

    def torch_save(n: int) -> Wait:
        torch.save(run.state(), folder / "torch.pt")
        return lambda: None

    def dcp_save(n: int) -> Wait:
        save(run.state(), checkpoint_id=folder / "dcp")
        return lambda: None

    def dcp_async(n: int) -> Wait:
        future: Any = async_save(run.state(), checkpoint_id=folder / "dcp-async")
        return future.result  # type: ignore[no-any-return]

    return {
        "no save": lambda n: lambda: None,
        "dtt": dtt_save(True),
        "dtt, checkpoint.asynchronous=false": dtt_save(False),
        "torch.save": torch_save,
        "torch DCP save": dcp_save,
        "torch DCP async_save": dcp_async,
    }


def save_and_train(
    run: Run, begin: Callable[[int], Wait], numbers: Iterator[int]
) -> tuple[float, float, float]:
    """Return the seconds blocked, of the next step, and of the complete round."""
    run.step()
    start = time.perf_counter()
    wait = begin(next(numbers))
    blocked = time.perf_counter() - start
    following = run.step()
    for _ in range(STEPS - 1):
        run.step()
    wait()
    return blocked, following, time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    run = Run()
    try:
        methods = {
            name: partial(save_and_train, run, begin, count(1))
            for name, begin in save_methods(run, folder).items()
        }
        results = in_turns(methods, rounds)
        medians = {name: column_medians(rows) for name, rows in results.items()}
        size = sum(t.nbytes for part in run.state().values() for t in part.values())
        _, step, round_without_save = medians["no save"]
        print(f"{size / 1e9:.2f} GB, step {step:.2f} s, {rounds} rounds, medians")
        table = Table("", 38, {"blocked s": 10, "next step": 11, "cost s": 9})
        for name, (blocked, following, total) in medians.items():
            cost = total - round_without_save
            table.row(name, f"{blocked:.3f}", f"{following / step - 1:+.0%}", f"{cost:.2f}")
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
