"""Profiles of chosen steps on chosen ranks, requested in the config or while a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.config.train import ProfileConfig, ProfileKind
from dtt.mesh.dist import World
from dtt.train.process_memory import dump_snapshot
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.throughput import ThroughputMeter

STEPS_ON_REQUEST = 3
ROWS = 25
"""Number of rows of the table of the longest operations."""
ALLOCATIONS = 1_000_000
"""Maximum number of allocations that a memory profile records."""


class Profiler:
    """Profiler of the requested steps; `step` wraps each step of the training loop."""

    def __init__(
        self,
        config: ProfileConfig,
        world: World,
        folder: Path,
        meter: ThroughputMeter,
        watchdog: Watchdog,
    ) -> None:
        """Create a profiler that writes into `folder`.

        `meter` and `watchdog` are in their phase `profile` while it writes. Raise ConfigError for a
        kind of profile that this device does not support.
        """
        if config.kind not in available(world.device):
            raise ConfigError(
                f"this kind of profile is not available on a {world.device.type}",
                where=f"profile.kind={config.kind}",
                next="profile.kind=torch",
            )
        self._device, self._folder = world.device, folder
        self._meter, self._watchdog = meter, watchdog
        self._name = f"rank-{world.rank:05d}"
        self._selected = world.rank in config.ranks
        self._kind = self._configured_kind = config.kind
        self._first, self._last = config.steps or (0, 0)
        self._began = 0
        """First step of the profile being recorded; 0 without one."""
        self._trace: torch.profiler.profile | None = None

    def request(self, step: int, kind: str) -> None:
        """Record the `STEPS_ON_REQUEST` steps after `step`.

        Without a `kind` that this device supports, the configured kind is used. Ignored while a
        profile is being recorded.
        """
        if self._began:
            return
        self._first, self._last = step + 1, step + STEPS_ON_REQUEST
        supported = available(self._device)
        self._kind = next((one for one in supported if one == kind), self._configured_kind)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run step number `step`, counted from 1, inside; record it if that was requested."""
        if not self._selected or not self._first <= step <= self._last:
            yield
            return
        if self._began == 0:
            self._begin(step)
        nvtx = self._kind == "nsys"
        if nvtx:
            torch.cuda.nvtx.range_push(f"step {step}")  # type: ignore[no-untyped-call]
        with torch.profiler.record_function(f"step {step}"):
            yield
        if nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if step == self._last:
            self.finish(step)

    def finish(self, step: int) -> None:
        """End the profile being recorded, if any, with `step` as its last step, and write it."""
        if self._began:
            with self._watchdog.phase("profile"), self._meter.paused("profile"):
                self._write(step)

    def _write(self, step: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._folder.mkdir(exist_ok=True)
        stem = self._folder / f"steps-{self._began:06d}-{step:06d}-{self._name}"
        self._began = 0
        match self._kind:
            case "torch":
                self._write_trace(stem)
            case "memory":
                dump_snapshot(f"{stem}.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
                log.warning("profile: %s.pickle", stem)
            case "nsys":
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def _begin(self, step: int) -> None:
        self._began = step
        match self._kind:
            case "torch":
                # There is one cycle only: this keeps torch from warning that cycles lose events.
                self._trace = torch.profiler.profile(acc_events=True)
                self._trace.start()
            case "memory":
                torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)  # noqa: SLF001
            case "nsys":
                torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def _write_trace(self, stem: Path) -> None:
        assert self._trace is not None
        trace, self._trace = self._trace, None
        trace.stop()
        trace.export_chrome_trace(f"{stem}.json.gz")
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        stem.with_suffix(".txt").write_text(f"{table}\n")
        log.warning("profile: %s.json.gz and .txt", stem)


def available(device: torch.device) -> tuple[ProfileKind, ...]:
    """Return the kinds of profiles that a device supports."""
    return ("torch", "memory", "nsys") if device.type == "cuda" else ("torch",)
