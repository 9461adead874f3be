"""The device and process groups of this rank: NCCL or Gloo for tensors, Gloo for control."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dtt.base.errors import DttError, EnvironmentUnfit, PeerLost
from dtt.base.log import log
from dtt.base.ranks import Ranks

T = TypeVar("T")

SHARED_GPU = "cuda:0"
"""The value of `train.device` with which all ranks share a GPU."""


@dataclass(frozen=True)
class World:
    """The device of this rank, and its communication with the other ranks."""

    ranks: Ranks
    device: torch.device
    control: dist.ProcessGroup | None
    """Gloo group for small host-side collectives, which never wait for the device; None with one
    rank, or before the ranks have met."""
    background: dist.ProcessGroup | None = None
    """Separate Gloo group for the thread that writes checkpoints."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.ranks.first

    def barrier(self) -> None:
        """Wait on the host until every rank has reached the barrier."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def maximum(self, value: int) -> int:
        """Return the maximum of `value` over all ranks; a host-side collective."""
        return self.maxima(value)[0]

    def maxima(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks; a host-side collective."""
        if self.control is None:
            return list(values)
        # On the CPU and the control group: a NCCL collective would queue behind the kernels of the
        # step, and reading its result would wait for them.
        largest = torch.tensor(values)
        # Dissemination (Hensgen, Finkel and Manber, 1988): after each round a rank has the maximum
        # of twice as many, also of itself twice, which changes no maximum. With 1,024 ranks these
        # are 10 messages one after another. Every step waits for them; Gloo's all-reduce goes
        # around a ring, and would take 2,046.
        distance = 1
        while distance < self.size:
            received = largest.clone()
            sent = dist.isend(largest, (self.rank + distance) % self.size, self.control)
            dist.recv(received, (self.rank - distance) % self.size, self.control)
            assert sent is not None  # None only for a rank outside of the group
            sent.wait()
            largest = torch.maximum(largest, received)
            distance *= 2
        return list(map(int, largest.tolist()))

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank; a host-side collective."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        # Pickles through the control group. Only small objects pass here.
        dist.all_gather_object(values, value, group=self.control)
        return values

    def exchange(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order; for the checkpoint thread."""
        return replace(self, control=self.background).gather(value)

    def from_first(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return self.from_rank(value, 0)

    def on_first(self, action: Callable[[], T]) -> T:
        """Return what `action` returns on rank 0; raise its DttError or OSError on every rank."""
        found: list[T] = []
        error: Exception | None = None
        if self.first:
            try:
                # Caught so that every rank leaves the broadcast: an exception on rank 0 alone would
                # leave the others waiting until the timeout.
                found.append(action())
            except (DttError, OSError) as raised:
                error = raised
        found, error = self.from_first((found, error))
        if error is not None:
            raise error
        return found[0]

    def from_rank(self, value: T, rank: int) -> T:
        """Return the `value` of rank `rank` on every rank."""
        if self.control is None:
            return value
        box: list[T] = [value]
        dist.broadcast_object_list(box, src=rank, group=self.control)
        return box[0]


def start(ranks: Ranks, device: str, timeout: timedelta = timedelta(minutes=30)) -> World:
    """Choose the device (see `train.device`) and join the process group of all ranks.

    The rendezvous is at MASTER_ADDR and MASTER_PORT, which torchrun or dtt's job script sets. A
    collective that takes longer than `timeout` fails.
    """
    chosen = choose_device(ranks, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if device == SHARED_GPU and ranks.size > 1:
        _share_gpu(ranks)
    if ranks.size == 1:
        return World(ranks, chosen, None)
    by_srun = (
        ranks.launcher in ("slurm", "pmi") and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    )
    if ranks.launcher != "torchrun" and not by_srun:
        raise EnvironmentUnfit(
            f"{ranks.launcher} has started {ranks.size} processes without a rendezvous address",
            next=f"torchrun --standalone --nproc_per_node {ranks.local_size} -m dtt.main …; "
            "for srun, export MASTER_ADDR=FIRST_NODE MASTER_PORT=29500",
        )
    on_gpu = chosen.type == "cuda"
    log.info("waiting for all %d ranks to start", ranks.size)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timeout, rank=ranks.rank, world_size=ranks.size
    )
    # NCCL has no operations on host memory. Without a GPU, Gloo carries tensors too, and one group
    # suffices.
    control = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
    # Writing to a slow disk may take long. A rank that has ended is still noticed immediately.
    background = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    return World(ranks, chosen, control, background)


def choose_device(ranks: Ranks, device: str, *, gpus_asked: int = 0) -> torch.device:
    """Return the device of this rank.

    `auto` uses a GPU if there is one. In a Slurm job that has GPUs, or whose configuration requests
    `gpus_asked` per node, `auto` never falls back to the CPU: a job that runs there for days is a
    mistake. Raises EnvironmentUnfit if a GPU is required and torch sees none.
    """
    if torch.cuda.is_available() and device != "cpu":
        return torch.device("cuda", 0 if device == SHARED_GPU else _gpu(ranks))
    if device.startswith("cuda"):
        raise EnvironmentUnfit(
            f"train.device is {device}, but torch sees no GPU",
            why=f"torch {torch.__version__}, CUDA build: {torch.version.cuda or 'none'}",
            next="train.device=cpu, or install a GPU build of torch where there is a GPU",
        )
    if device == "auto" and (asked := _gpus_of_job(gpus_asked)):
        cuda = torch.version.cuda
        built = f"for CUDA {cuda}: its driver is missing or hidden" if cuda else "for the CPU"
        raise EnvironmentUnfit(
            f"this Slurm job has GPUs ({asked}), but torch sees none",
            where=f"node {socket.gethostname()}",
            why=f"torch {torch.__version__} is built {built}",
            next="install a GPU build of torch; in a container, apptainer's --nv; "
            "or train.device=cpu to train on the CPU anyway",
        )
    return torch.device("cpu")


def _share_gpu(ranks: Ranks) -> None:
    """Let all ranks use one GPU: set what NCCL and torch read, before NCCL starts.

    NCCL refuses two ranks with the same host and bus. With a host id of its own, each takes the
    others for other machines and reaches them through sockets, at about 15 ms a collective.
    """
    if ranks.local_size != ranks.size:
        raise EnvironmentUnfit(
            f"train.device={SHARED_GPU} is for processes of one machine",
            why=f"{ranks.local_size} of {ranks.size} processes are here",
            next="train.device=cuda",
        )
    os.environ |= {
        "NCCL_HOSTID": f"rank-{ranks.rank}", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip
    # So that a rank whose memory runs out takes none of the others'. A tenth is for CUDA itself.
    torch.cuda.set_per_process_memory_fraction(0.9 / ranks.size)


def _gpus_of_job(asked: int) -> str:
    """Return the setting that shows that this Slurm job has GPUs; empty without one."""
    if "SLURM_JOB_ID" not in os.environ:
        return ""
    if (count := os.environ.get("SLURM_GPUS_ON_NODE", "0")) != "0":
        return f"SLURM_GPUS_ON_NODE={count}"
    if indices := os.environ.get("SLURM_JOB_GPUS"):
        return f"SLURM_JOB_GPUS={indices}"
    return f"launch.gpus_per_node={asked}" if asked else ""


def _gpu(ranks: Ranks) -> int:
    """Return the index of this rank's GPU: 0 if srun assigned each its own, else the local rank.

    Raises EnvironmentUnfit if this node has more ranks than GPUs.
    """
    count = torch.cuda.device_count()
    # srun with --gpus-per-task hides the GPUs of the other tasks, so each sees its own as number 0.
    if count == 1 and ranks.launcher in ("slurm", "pmi"):
        return 0
    if ranks.local_size > count:  # true on every local rank, so rank 0 reports it
        raise EnvironmentUnfit(
            f"{ranks.local_size} processes were started here, but there are only {count} GPUs",
            next=f"torchrun --nproc_per_node {count} …",
        )
    return ranks.local_rank


def stop() -> None:
    """Destroy the process group, if there is one and no exception is being handled.

    After a failure on one rank, NCCL would wait here for collectives that the others never join.
    They notice the failure only when this process has ended, which `process.command` does.
    """
    if dist.is_initialized() and sys.exception() is None:
        dist.destroy_process_group()


@contextmanager
def lost_peers_reported() -> Iterator[None]:
    """Convert the error of a collective that failed because another rank has ended to PeerLost."""
    try:
        yield
    except RuntimeError as error:  # Gloo raises RuntimeError, NCCL a subclass
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise PeerLost(
                "another process of this run has ended",
                why=str(error).splitlines()[0],
                next="its own message has the reason; run the same command again if there is none",
            ) from None
        raise


def native_bf16(device: torch.device) -> bool:
    """Return True if `device` multiplies bf16 in hardware; elsewhere it is emulated and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public functions for these.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001
