"""Memory, speed and links of GPUs by name, from the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from dtt.base import host_memory
from dtt.base.errors import ConfigError
from dtt.config.run import RunConfig
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
# GPU in H100, H200, B200 and MI300X nodes, 200 in A100 nodes, 100 in nodes of L40 and A40, else 25.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", 79.1, 67.0, 3.35, 450.0, 50.0),
        _gpu("H200", 139.8, 67.0, 4.8, 450.0, 50.0),
        _gpu("B200", 178.3, 75.0, 8.0, 900.0, 50.0),
        _gpu("A100-40", 39.4, 19.5, 1.56, 300.0, 25.0),
        _gpu("A100-80", 79.1, 19.5, 2.04, 300.0, 25.0),
        _gpu("L40S", 44.4, 91.6, 0.86, 32.0, 12.5),
        _gpu("L40", 44.4, 90.5, 0.86, 32.0, 12.5),
        _gpu("L4", 22.0, 30.3, 0.3, 32.0, 3.1),
        _gpu("A40", 44.4, 37.4, 0.7, 32.0, 12.5),
        _gpu("A10", 22.0, 31.2, 0.6, 32.0, 3.1),
        _gpu("T4", 14.6, 8.1, 0.32, 16.0, 3.1),
        _gpu("RTX 6000 Ada", 47.4, 91.1, 0.96, 32.0, 3.1),
        _gpu("RTX A6000", 47.4, 38.7, 0.77, 32.0, 3.1),
        _gpu("RTX 5090", 31.3, 104.8, 1.79, 64.0, 3.1),
        _gpu("RTX 4090", 23.5, 82.6, 1.01, 32.0, 3.1),
        _gpu("RTX 3090", 23.5, 35.6, 0.94, 32.0, 3.1),
        _gpu("MI300X", 191.5, 163.4, 5.3, 448.0, 50.0),
    )
}
MAKERS = re.compile(r"(nvidia|geforce|tesla|amd|instinct|rtx)-?")
CPU_BYTES_PER_SECOND = 10e9
"""Bandwidth of a CPU's memory and of links between processes: a guess, as measuring takes long."""


def find(name: str, processes: int) -> Gpu:
    """Return the GPU of that name; `cpu` is an equal share of this machine for each process.

    `processes` is the number of processes on this machine. Raise ConfigError, which lists the known
    names, for any other name.
    """
    if name.lower() == "cpu":
        return _this_cpu(processes)
    known = known_name(name)
    if known is None:
        raise ConfigError(f"unknown GPU {name!r}", next=f"--gpu one of: {', '.join(GPUS)}; or cpu")
    return GPUS[known]


def for_run(cfg: RunConfig, name: str | None) -> Gpu | None:
    """Return the device to plan a run for; None if it is for GPUs, and nothing says for which.

    It is the one called `name`, else the type in `launch.gpus_per_node`, else that of this machine.
    """
    processes = cfg.launch.processes
    requested, _, number = str(cfg.launch.gpus_per_node).rpartition(":")
    if chosen := name or known_name(requested):
        return find(chosen, processes)
    if torch.cuda.is_available():
        return _this_gpu()
    for_gpus = int(number) > 0 or cfg.train.device.startswith("cuda")
    return None if for_gpus else find("cpu", processes)


def known_name(text: str) -> str | None:
    """Return the name in GPUS of what a user, a driver or a cluster calls `text`, or None."""
    words = _spelled(text)
    if re.match(r"a100\b", words):  # memory in any place: A100-SXM4-40GB
        return "A100-40" if "40" in words[4:] else "A100-80"
    return next((gpu for gpu in GPUS if re.match(rf"{_spelled(gpu)}\b", words)), None)


def _spelled(name: str) -> str:
    """Return a name in lower case, with a dash between its words, without those of makers."""
    words = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    while found := MAKERS.match(words):
        words = words[found.end() :]
    return words


def _this_gpu() -> Gpu:
    """Return the GPU of this machine; one that is not in GPUS is measured."""
    device = torch.device("cuda")
    name = torch.cuda.get_device_name()
    if (known := known_name(name)) is not None:
        return GPUS[known]
    bf16, fp32 = (measured_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    memory = torch.cuda.get_device_properties(device).total_memory
    # The links of the slowest cards in GPUS; its memory moves about a byte for each 100 FLOP.
    return Gpu(name, memory, bf16, fp32, bf16 / 100, 16e9, 3.1e9)


def _this_cpu(processes: int) -> Gpu:
    device = torch.device("cpu")
    bf16, fp32 = (measured_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    share = CPU_BYTES_PER_SECOND / processes
    memory = host_memory.total() // processes
    return Gpu("CPU", memory, bf16 / processes, fp32 / processes, share, share, share, kind="cpu")
