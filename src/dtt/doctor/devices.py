"""Device inspection: name, memory, throughput, and a matmul with a known result."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

import psutil
import torch

from dtt.base.errors import EnvironmentUnfit
from dtt.mesh.dist import World, native_bf16
from dtt.mesh.environment import cpu_name, without
from dtt.mesh.peak_flops import SIZE, measured_flops

SLOW = 3.0
"""A device or link is slow if it takes this many times as long as similar ones. The factor exceeds
the usual variation between runs."""


@dataclass(frozen=True)
class Device:
    """A CPU or GPU as torch sees it."""

    device: str
    """Name of the device in torch, `cpu` or `cuda:0`."""
    name: str
    free: int
    """Free memory in bytes, of `total`."""
    total: int
    native_bf16: bool
    tflops: dict[str, float]
    """Throughput of a square matmul in TFLOP/s, by dtype."""
    wrong: tuple[str, ...]
    """Data types whose matmul returned a wrong result."""


def examine_all(world: World) -> list[Device]:
    """Examine this rank's device; without other ranks, every GPU of the node.

    Raises EnvironmentUnfit if a device does not compute.
    """
    found = [world.device]
    if world.size == 1 and world.device.type == "cuda":
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = []
    for device in found:
        try:
            devices.append(examine(device))
        except RuntimeError as error:  # CUDA errors, out of memory included
            node = socket.gethostname()
            raise EnvironmentUnfit(
                f"{device} failed a computation",
                where=f"rank {world.rank} on node {node}",
                why=str(error).splitlines()[0],
                next=f"see who uses it (`nvidia-smi`); {without(node)}",
            ) from None
    return devices


def examine(device: torch.device) -> Device:
    """Return the properties of a device, and measure and check its matmuls."""
    native = native_bf16(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = psutil.virtual_memory()
        name, free, total = cpu_name(), memory.available, memory.total
    tflops, wrong = {}, []
    for dtype in (torch.float32, torch.bfloat16) if native else (torch.float32,):
        dtype_name = str(dtype).removeprefix("torch.")
        tflops[dtype_name] = measured_flops(device, dtype) / 1e12
        if not _multiplies(device, dtype):
            wrong.append(dtype_name)
    return Device(str(device), name, free, total, native, tflops, tuple(wrong))


def wait(device: torch.device) -> None:
    """Wait until `device` has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def faults(devices: Sequence[tuple[int, str, Device]]) -> Iterator[EnvironmentUnfit]:
    """Yield a problem for each device that computes wrong results or is slower than similar ones.

    `devices` holds (rank, node, device). Slow CPUs are not reported: their speed depends mostly on
    other processes.
    """
    for rank, node, one in devices:
        for dtype, rate in one.tflops.items():
            alike = [other for _, _, other in devices if other.name == one.name]
            usual = median_high(other.tflops[dtype] for other in alike)
            if dtype in one.wrong:
                what, why = "multiplies wrong", f"a matrix product in {dtype} with a known result"
            elif one.device != "cpu" and rate < usual / SLOW:
                what, why = "is slow", f"{rate:.3g} TFLOP/s in {dtype}, usual here {usual:.3g}"
            else:
                continue
            where = f"rank {rank} on node {node}: {one.name}"
            yield EnvironmentUnfit(f"{one.device} {what}", where=where, why=why, next=without(node))


def check_seen() -> None:
    """Raise EnvironmentUnfit if this process may use a GPU that torch does not see."""
    nodes = Path("/dev").glob("nvidia[0-9]*")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.cuda.is_available() or hidden or not any(os.access(n, os.R_OK) for n in nodes):
        return
    raise EnvironmentUnfit(
        "there is a GPU, but torch does not see it",
        why=f"torch {torch.__version__}, CUDA build: {torch.version.cuda or 'none'}",
        next="install a build of torch for this driver (`nvidia-smi`), or use --device cpu",
    )


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a matmul [n, n] @ [n, n] is correct in every element.

    A[i, k] = r[i] s[k] and B[k, j] = s[k] c[j] with s of 1 and -1, so (A B)[i, j] = n r[i] c[j].
    With r and c of 1 to 4 and n a power of two, this and all partial sums are exact in any dtype.
    """
    n = SIZE[device.type]
    i = torch.arange(n, device=device)
    ramp = (i % 4 + 1).to(dtype)
    sign = (1 - 2 * (i % 3 % 2)).to(dtype)
    a, b = ramp[:, None] * sign, sign[:, None] * ramp
    return bool((a @ b == n * ramp[:, None] * ramp).all().item())
