"""Peak matrix-multiplication throughput of a device: from its data sheet, and measured."""

from __future__ import annotations

import re
import time

import torch

# Dense bf16 matmul peak by device name, in FLOP/s, from the vendors' data sheets (no sparsity, sums
# in fp32). The first entry whose words the device's name contains is used, so longer ones come
# first. A T4 has no units for bf16: its peak is that of fp32.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "T4": 8.1e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # one of its two dies; torch sees each as a device
}

SECONDS = {"cuda": 0.1, "cpu": 0.04}
"""Duration of the measurement in seconds; a GPU needs part of it to raise its clocks."""
SIZE = {"cuda": 8192, "cpu": 1024}
"""Size n of the [n, n] matrices; larger ones do not increase the throughput."""


def peak_flops(device: torch.device) -> float | None:
    """Return the bf16 peak of one device in FLOP/s; None if the device is unknown."""
    return None if device.type != "cuda" else peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Return the bf16 peak in FLOP/s of the device that its driver calls `name`, or None."""
    # Whole words: an L40 is no L4, and an A100 no A10.
    return next((p for known, p in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)


@torch.no_grad()
def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several large square matmuls on this device.

    On a CPU that would need seconds for one of them (most do in bf16), the matmuls are smaller.
    """
    size, seconds = SIZE[device.type], SECONDS[device.type]
    if device.type == "cpu":
        # A sixteenth of the elements first: an emulated bf16 product of full size may take longer
        # than the whole start.
        rate = _matmul_flops(device, dtype, size // 4, seconds / 8)
        if 2.0 * size**3 / rate > 10 * seconds:
            return rate
    return _matmul_flops(device, dtype, size, seconds)


def _matmul_flops(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """Return the FLOP/s of the fastest [size, size] matmul within `seconds`."""
    # Random numbers, because a GPU draws less power with zeros, and clocks higher.
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    torch.mm(a, b, out=out)  # the first call loads a library
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or fastest == float("inf"):
        finish(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        finish(device)
        # The fastest one, not the mean: other processes can only slow a product down.
        fastest = min(fastest, time.perf_counter() - start)
    del a, b, out
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model needs the memory
    return 2.0 * size**3 / fastest


def finish(device: torch.device) -> None:
    """Wait until the device has computed all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
