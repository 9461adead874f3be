"""Measurement of a process's memory, and advice when it runs out."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import psutil
import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base import host_memory
from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log
from dtt.config.adapter import LoraConfig
from dtt.config.parallel import Sizes
from dtt.config.run import RunConfig
from dtt.hf.model_source import frozen_architectures
from dtt.mesh.dist import World
from dtt.model import count
from dtt.model.adapted_layers import adaptable, adapter_weights
from dtt.model.architecture import AnyArchitecture
from dtt.train.precision import Precision

MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of `ru_maxrss` of `getrusage`."""


class MemoryMeter:
    """Peak and steady memory of this process's device.

    On a GPU the memory that torch has allocated and reserved, on a CPU the resident memory of the
    process.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the measurement: on a GPU, reset the peak."""
        self._device = device
        self._peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float | None]:
        """Return the peak, the steady memory and the reserved memory, in GB.

        The steady memory is the peak since the last reading; on a CPU, the memory held now. The
        first steps compile and make the optimizer state, so that later readings show less.
        """
        held, reserved = most_held(self._device), None
        if self._device.type == "cuda":
            steady = held
            reserved = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            steady = int(psutil.Process().memory_info().rss)
        self._peak = max(self._peak, held, steady)  # some systems update ru_maxrss in coarse steps
        return {
            "memory_gb": _gb(self._peak),
            "memory_steady_gb": _gb(steady),
            "memory_reserved_gb": None if reserved is None else _gb(reserved),
        }


def most_held(device: torch.device) -> int:
    """Return the peak bytes: on a GPU since the last reading, on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


def _gb(size: int) -> float:
    return round(size / 1e9, 3)


def least_memory(cfg: RunConfig, arch: AnyArchitecture, sizes: Sizes, precision: Precision) -> int:
    """Return the bytes that a rank holds at least, without building anything of the model.

    These are weights, gradients and optimizer state, sharded over the mesh, and the frozen models
    of the objective. Below an adapter, the frozen weights have neither gradients nor state.
    """
    # Weights, gradients, and what the optimizer keeps at least: Muon one number per weight of a
    # hidden matrix, AdamW two per weight. One of a user's own may keep none, like SGD.
    size, optim = precision.weights.itemsize, cfg.optim
    state = {"muon": size, "adamw": 2 * size}.get(optim.type, 0)
    if "8bit" in (getattr(optim, "state", ""), getattr(getattr(optim, "adamw", None), "state", "")):
        state = min(state, 2)  # the codes of both moments; Muon's head may have them
    total, adapter = count.parameters(arch), adapter_weights(cfg.adapter, arch)
    frozen = precision.compute_dtype.itemsize * total if adapter else 0
    if isinstance(cfg.adapter, LoraConfig) and cfg.adapter.base == "nf4":
        quantized = sum(map(prod, adaptable(arch).values()))
        frozen -= quantized * precision.compute_dtype.itemsize - quantized // 2
    trained = (2 * size + state) * (adapter or total)
    # Only FSDP2 divides the frozen models of an objective, and no stage of a pipeline lacks them.
    held = sum(map(count.parameters, frozen_architectures(cfg.objective)))
    models = precision.compute_dtype.itemsize * held // (sizes.shard * sizes.context)
    return (frozen + trained) // (prod(sizes) // sizes.replicate) + models


def reduces_each(cfg: RunConfig, arch: AnyArchitecture, sizes: Sizes, memory: int) -> bool:
    """Return True if sharded gradients are reduced after each micro-batch, by `parallel.reduce`.

    `memory` is that of a device, in bytes.
    """
    # A rule that needs no estimate of activations. It chooses as the shipped runs of 8B, 20B and
    # 70B do, whose whole gradients take 37, 97 and 10 % of 80 GiB. Of experts that ranks share it
    # counts all.
    trained = adapter_weights(cfg.adapter, arch) or count.parameters(arch)
    whole = torch.float32.itemsize * trained // (sizes.tensor * sizes.pipeline)
    reduce = cfg.parallel.reduce
    return 4 * whole > memory if reduce == "auto" else reduce == "each"


def device_memory(world: World) -> int:
    """Return the bytes of the memory of this rank's device; ranks of a machine share the host's."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    return host_memory.total(swap=True) // world.ranks.local_size


def check_memory(
    cfg: RunConfig, arch: AnyArchitecture, sizes: Sizes, precision: Precision, world: World
) -> None:
    """Raise EnvironmentUnfit if the model cannot fit, before any of it is allocated.

    Compares `least_memory` with all memory of the device, so that a run that fits is never refused;
    one that is not refused may still run out of memory. On a CPU the processes of this machine
    share its memory.
    """
    # Not the prediction of `dtt plan`, which is wrong by some percent in both directions. It is
    # never below this (tests/estimate/test_least_memory.py). And nothing is built to count: a model
    # of a million layers by a slip of the hand would take minutes to be refused.
    needed = least_memory(cfg, arch, sizes, precision)
    on_gpu, has = world.device.type == "cuda", device_memory(world)
    if not on_gpu:
        needed, has = needed * world.ranks.local_size, has * world.ranks.local_size
    if needed > has:
        raise EnvironmentUnfit(
            f"the model does not fit into the memory of this {'GPU' if on_gpu else 'machine'}",
            where="model",
            why=f"{count.parameters(arch) / 1e6:,.0f}M parameters take at least "
            f"{needed / 1e9:,.0f} GB with gradients and optimizer state, and there are "
            f"{has / 1e9:,.0f} GB",
            next="a smaller model (model.dim, model.n_layers, model.ffn_dim, model.vocab_size), "
            "or more devices with parallel.shard=-1; dtt plan shows what fits",
        )


@contextmanager
def exhaustion_explained(cfg: RunConfig, job: JobDir, world: World) -> Iterator[None]:
    """Turn an out-of-memory error inside into EnvironmentUnfit, which lists what to change.

    On a GPU, a snapshot of its memory is written for https://pytorch.org/memory_viz.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        where = None
        if world.device.type == "cuda":
            where = job.profiles / f"oom-rank-{world.rank:05d}.pickle"
            try:
                where.parent.mkdir(exist_ok=True)
                dump_snapshot(str(where))
            except (OSError, RuntimeError) as failure:  # there may be no memory for the snapshot
                log.warning("no memory snapshot: %s", failure)
                where = None
        peak = most_held(world.device)
        message = str(error).splitlines()[0] if str(error) else "no memory"
        raise EnvironmentUnfit(
            f"the {'GPU' if world.device.type == 'cuda' else 'machine'} of rank {world.rank} "
            "has too little memory for this run",
            where=where,
            why=f"{message} (at most {_gb(peak):.2f} GB were allocated)",
            next="in this order, until it fits: " + "; ".join(remedies(cfg, world.size)),
        ) from None


def dump_snapshot(path: str) -> None:
    """Write a snapshot of the GPU's memory, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]  # noqa: SLF001  its documented name


def is_exhaustion(error: Exception) -> bool:
    """Return True if an error means that a device or the machine ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)  # which raises a plain RuntimeError


def remedies(cfg: RunConfig, processes: int) -> Iterator[str]:
    """Yield changes that reduce memory, the cheapest first."""
    rows = cfg.train.micro_batch
    if rows > 1:
        yield f"train.micro_batch={rows // 2}"
    if cfg.train.remat == "none":
        yield "train.remat=full"
    if processes > 1 and cfg.parallel.shard == 1:
        yield f"parallel.shard={processes}"
    yield "more processes with parallel.shard=-1" if processes == 1 else "more processes"
    yield "a smaller model"
