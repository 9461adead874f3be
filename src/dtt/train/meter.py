"""How fast training goes, and what share of the hardware that is."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

# Dense bf16 matmul peak by device name, in FLOP/s, from the vendors' data sheets (no sparsity).
# The first entry that the device's name contains is taken, so the longer names come first.
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
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # one of its two dies, which is one device to torch
}

RECENT = 256
"""Steps that are remembered one by one."""
Mark = float | torch.cuda.Event
Span = tuple[float, Mark, Mark]
"""A step: when the host began it, and its start and end on the device."""


def peak_flops(device: torch.device) -> float | None:
    """bf16 peak of one device in FLOP/s; None for an unknown one, never a guess."""
    return None if device.type != "cuda" else peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """`peak_flops` of the device that its driver calls `name`."""
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


class Meter:
    """Clocks training steps; evaluation, samples and saves are taken out with `paused`."""

    def __init__(self, device: torch.device, world_size: int, precision: str) -> None:
        """Only bf16 has an MFU, against its peak."""
        self._device = device
        self._peak = peak_flops(device) if precision == "bf16" else None
        self._devices = world_size
        self._start = time.perf_counter()
        self._steps = self._tokens = self._flops = 0
        self._spans: deque[Span] = deque(maxlen=RECENT)
        self._paused = 0.0
        self.pauses: dict[str, float] = {}
        """What each kind of pause last took, in seconds."""

    @contextmanager
    def step(self, tokens: int, flops_per_token: int) -> Iterator[None]:
        """One step of so many tokens, over all devices, happens inside.

        `flops_per_token` as `dtt.model.count` has it.
        """
        began, start = time.perf_counter(), self._mark()
        yield
        self._spans.append((began, start, self._mark()))
        self._steps += 1
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def slowdown(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """By what share steps took longer than the median one before `begin`.

        First the next step after `begin`, then the mean of those begun until `end`; None when there
        are too few to tell. Times are those of `time.perf_counter`. Call when the device has
        finished these steps.
        """
        before = [self._seconds(span) for span in self._spans if span[0] < begin]
        after = [span for span in self._spans if span[0] >= begin]
        if not before or not after:
            return None, None
        usual = statistics.median(before)
        during = [self._seconds(span) / usual - 1 for span in after if span[0] <= end]
        following = self._seconds(after[0]) / usual - 1
        return round(following, 4), round(statistics.fmean(during or [following]), 4)

    def _mark(self) -> Mark:
        """This moment: on a GPU, that of the device, which lags behind the host."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, span: Span) -> float:
        _, start, end = span
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        return float(start.elapsed_time(end)) / 1e3  # type: ignore[union-attr,arg-type]

    def read(self) -> dict[str, float | None]:
        """Speed since the last reading; call when the device has finished those steps."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = self._tokens / seconds
        mfu = None
        if self._peak is not None:
            mfu = round(self._flops / (seconds * self._peak * self._devices), 4)
        reading = {
            "tokens_per_second": round(rate, 1),
            "seconds_per_step": round(seconds / max(self._steps, 1), 6),
            "mfu": mfu,
            "memory_gb": round(self._memory() / 1e9, 3),
        }
        self.restart()
        return reading

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """What happens inside takes no time."""
        start = time.perf_counter()
        yield
        self.pauses[what] = time.perf_counter() - start
        self._start += self.pauses[what]
        self._paused += self.pauses[what]

    def worked(self) -> float:
        """Seconds on a clock that stands still in pauses."""
        return time.perf_counter() - self._paused

    def restart(self) -> None:
        """Forget the time since the last reading."""
        self._start = time.perf_counter()
        self._steps = self._tokens = self._flops = 0

    def _memory(self) -> int:
        """Peak bytes allocated on the device; on a CPU, resident bytes of the process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)
