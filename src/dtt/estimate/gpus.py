"""Memory, speed and links of GPUs by name, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dtt.base import host_memory
from dtt.base.errors import ConfigError
from dtt.mesh.peak_flops import measured_flops, peak_by_name

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A device to plan for, in bytes, FLOP/s (dense) and bytes/s."""

    name: str
    memory: int
    """Memory that a process can use."""
    bf16: float
    """Peak in bf16."""
    fp32: float
    """Peak in fp32."""
    bandwidth: float
    """Memory bandwidth."""
    within: float
    """Bandwidth to another device of the node, one way."""
    between: float
    """Share of the bandwidth of the node's network, one way."""
    kind: Literal["cuda", "cpu"] = "cuda"


def _gpu(
    name: str, gib: float, fp32: float, terabytes: float, within: float, between: float
) -> Gpu:
    """Create a GPU from GiB, TFLOP/s, TB/s, GB/s, GB/s; its bf16 peak is the one that MFU uses."""
    bf16 = peak_by_name(name)
    assert bf16 is not None, name
    return Gpu(
        name, int(gib * GIB), bf16, fp32 * 1e12, terabytes * 1e12, within * 1e9, between * 1e9
    )


# Links within a node: NVLink 3 to 5, Infinity Fabric, PCIe 4. Between nodes: 400 Gbit/s for each
# GPU in H100, H200, B200 and MI300X nodes, 200 in A100 nodes, 100 in L40S nodes, 25 with RTX 4090.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", 79.1, 67.0, 3.35, 450.0, 50.0),
        _gpu("H200", 139.8, 67.0, 4.8, 450.0, 50.0),
        _gpu("B200", 178.3, 75.0, 8.0, 900.0, 50.0),
        _gpu("A100-40", 39.4, 19.5, 1.56, 300.0, 25.0),
        _gpu("A100-80", 79.1, 19.5, 2.04, 300.0, 25.0),
        _gpu("L40S", 44.4, 91.6, 0.86, 32.0, 12.5),
        _gpu("RTX 4090", 23.5, 82.6, 1.01, 32.0, 3.1),
        _gpu("MI300X", 191.5, 163.4, 5.3, 448.0, 50.0),
    )
}
ALSO = {"A100": "A100-80", "4090": "RTX 4090"}
CPU_BYTES_PER_SECOND = 10e9
"""Bandwidth of a CPU's memory and of links between processes: a guess, as measuring takes long."""


def find(name: str, processes: int) -> Gpu:
    """Return the GPU of that name; `cpu` is an equal share of this machine for each process.

    `processes` is the number of processes on this machine. Raise ConfigError, which lists the known
    names, for any other name.
    """
    if name.lower() == "cpu":
        return _this_cpu(processes)
    known = {gpu.lower(): GPUS[gpu] for gpu in GPUS}
    known |= {short.lower(): GPUS[gpu] for short, gpu in ALSO.items()}
    if name.lower() not in known:
        raise ConfigError(f"unknown GPU {name!r}", next=f"--gpu one of: {', '.join(GPUS)}; or cpu")
    return known[name.lower()]


def here() -> str:
    """Return the name of this machine's GPU for `find`; `cpu` if it has none that is known."""
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    if "A100" in device:
        return "A100-40" if "40GB" in device else "A100-80"
    return next((name for name in GPUS if name in device), "cpu")


def _this_cpu(processes: int) -> Gpu:
    device = torch.device("cpu")
    bf16, fp32 = (measured_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    share = CPU_BYTES_PER_SECOND / processes
    memory = host_memory.total() // processes
    return Gpu("CPU", memory, bf16 / processes, fp32 / processes, share, share, share, kind="cpu")
