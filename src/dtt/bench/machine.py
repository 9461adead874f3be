"""Facts about the machine that a benchmark ran on."""

from __future__ import annotations

from collections import Counter
from importlib import metadata

import psutil

from dtt.artifacts.manifest import Record
from dtt.base import local
from dtt.mesh.environment import cpu_name


class MachineFacts(Record):
    """The hardware of a machine and its version of torch."""

    cpu: str
    cores: int
    """Number of cores that dtt may use."""
    memory: int
    """Bytes of main memory."""
    gpus: dict[str, int]
    """Number of GPUs that the runs use, by model; empty for runs on the CPU."""
    torch: str

    @property
    def summary(self) -> str:
        """The hardware that trains, such as `8 x NVIDIA H100` or `2 cores of …`."""
        gpus = [f"{count} x {name}" for name, count in self.gpus.items()]
        return ", ".join(gpus) or f"{self.cores} cores, {self.cpu}"

    def is_like(self, hardware: str) -> bool:
        """Return True if these are the GPUs of a published result, such as `8 x H100`."""
        count, _, model = hardware.partition(" x ")
        return [str(n) for name, n in self.gpus.items() if model in name] == [count]


def this_machine(device: str, processes: int) -> MachineFacts:
    """Return the facts of this machine for runs on `device` (`train.device`).

    `processes` is the number of processes of a run, of which each uses one GPU; 0: all GPUs.
    """
    gpus: list[str] = []
    if device != "cpu":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        used = min(count, processes or count)
        gpus = [torch.cuda.get_device_name(index) for index in range(used)]
    return MachineFacts(
        cpu=cpu_name(),
        cores=local.cores(),
        memory=psutil.virtual_memory().total,
        gpus=dict(Counter(gpus)),
        torch=metadata.version("torch"),
    )
