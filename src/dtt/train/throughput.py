"""Measurement of training: time by part, tokens per second, MFU, communication, memory."""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from dtt.base.log import log
from dtt.mesh.dist import World
from dtt.mesh.peak_flops import measured_flops, peak_flops
from dtt.model import count
from dtt.model.architecture import AnyArchitecture
from dtt.parallel.pipelining import Pipeline
from dtt.train.process_memory import MemoryMeter

Part = Literal[
    "data", "forward_backward", "optimizer", "evaluate", "tasks", "sample", "save", "profile",
    "other",
]  # fmt: skip
STEP: tuple[Part, ...] = ("data", "forward_backward", "optimizer", "other")
"""Parts of the steps themselves, whose time counts for the reported speed."""
RECENT = 256
"""Number of most recent steps whose start and end are kept."""
SLOW = {"cuda": 0.1, "cpu": 0.5}
"""Fraction by which a device's matrix products may be slower than the median before a warning at
the start. The speed of a CPU depends on what else runs on its cores at that moment."""
Mark = float | torch.cuda.Event
Span = tuple[float, Mark, Mark]
"""A step: the time at which the host started it, and its start and end on the device."""


@runtime_checkable
class CommunicationTimer(Protocol):
    """An optimizer whose ranks wait for each other's messages."""

    @property
    def waited_seconds(self) -> float:
        """Total waiting time; on a GPU, of the waits that the device has finished."""


@dataclass(frozen=True)
class RankSpeed:
    """A rank's node and measured speed, gathered on all ranks at the start."""

    node: str
    matmul: float
    """Measured FLOP/s of its device in matrix products."""


class ThroughputMeter:
    """Phase timer of training: `end_phase` assigns the time since its last call to a part.

    On a GPU it records CUDA events, because the device lags behind the host. Nothing synchronises
    until `read`, which is called when the host has waited for the device anyway. `data` is
    therefore the time for which the device was idle because a batch was late.
    """

    def __init__(
        self,
        arch: AnyArchitecture,
        compute_dtype: torch.dtype,
        world: World,
        optimizers: Sequence[Optimizer] = (),
        *,
        adapter: int = 0,
    ) -> None:
        """Create the meter, and measure the speed of matrix products; all ranks call it together.

        `optimizers` that are a `CommunicationTimer` report their waiting time, which counts as
        communication. `adapter` is the number of its weights, if all others are frozen.
        """
        # Counted once for each length: a model that its family builds is copied and run on tensors
        # without values for it. Twice in each step, that took a quarter of a small model's time.
        self._flops_per_token = cache(partial(count.flops_per_token, arch, adapter=adapter))
        self._world, self._device = world, world.device
        # The data sheets give bf16 peaks, so MFU of fp32 would compare different units.
        self._peak = peak_flops(self._device) if compute_dtype is torch.bfloat16 else None
        matmul = measured_flops(self._device, compute_dtype)
        # Gathered once, at the start: a slow device shows before hours are lost on it.
        self._ranks = world.gather(RankSpeed(socket.gethostname(), matmul))
        if world.first:
            for line in slow_devices(self._ranks, SLOW[self._device.type]):
                log.warning("%s", line)
        self._memory = MemoryMeter(self._device)
        self._spans: deque[Span] = deque(maxlen=RECENT)
        self._first: Span | None = None
        self._paused = self._waited = 0.0
        self._waiters = [o for o in optimizers if isinstance(o, CommunicationTimer)]
        self._pipeline: Pipeline | None = None
        self._gradients: Mark | None = None
        self._gradients_known = world.size == 1
        self.pauses: dict[str, float] = {}
        """Duration of the last pause of each kind, in seconds."""
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Seconds of each part over all readings."""
        self.steps = 0
        """Number of steps done by this process."""
        self._begin_interval()
        self._last = self._mark()

    @property
    def matmul(self) -> float:
        """Mean FLOP/s of the devices of the run in matrix products, measured at the start."""
        return statistics.fmean(rank.matmul for rank in self._ranks)

    def watch_gradients(self, first: nn.Parameter) -> None:
        """Measure the exposed all-reduce of gradients under DDP.

        `first` is the parameter that gets its gradient last. The backward pass ends when gradients
        are summed over ranks, so its remaining time from there on is communication. FSDP2 and
        tensor parallelism communicate throughout the pass: there only a profile shows it.
        """

        def ready(_: object) -> None:
            self._gradients = self._mark()

        # A hook, because no call marks the moment at which the last gradient is ready.
        first.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
        self._gradients_known = True

    def watch_pipeline(self, pipeline: Pipeline) -> None:
        """Measure for how long this rank of a pipeline computes, and so for how long it waits."""
        pipeline.mark = self._mark
        self._pipeline = pipeline

    @contextmanager
    def step(self, tokens: int, seq_len: int) -> Iterator[None]:
        """Measure a step inside; `tokens` is its number of tokens over all devices."""
        began = time.perf_counter()
        # Time since the last step, such as logging, belongs to no part of this one.
        self.end_phase("other")
        start = self._last
        yield
        self.end_phase("other")
        self._spans.append((began, start, self._last))
        self._first = self._first or self._spans[-1]
        self.steps += 1
        self._steps += 1
        self._tokens += tokens
        self._flops += tokens * self._flops_per_token(seq_len)
        self._causal += tokens * self._flops_per_token(seq_len, causal=True)

    def leave_out(self, padding: int) -> None:
        """Exclude the padding of the current step, over all devices, from the tokens per second.

        It still counts for the MFU, because the devices compute it.
        """
        self._tokens -= padding

    def end_phase(self, part: Part) -> None:
        """Assign the time since the last call to `part`."""
        mark = self._mark()
        self._phases.append((part, self._last, mark))
        # Only where the hook has fired: skipped steps have no backward pass.
        if part == "forward_backward" and self._gradients is not None:
            self._reductions.append((self._gradients, mark))
            self._gradients = None
        self._last = mark

    @contextmanager
    def paused(self, part: Part) -> Iterator[None]:
        """Assign the time inside to `part`, a pause that does not count as time of steps."""
        start = time.perf_counter()
        # The pause starts now; what came before is not part of it.
        self.end_phase("other")
        yield
        self.end_phase(part)
        self.pauses[part] = time.perf_counter() - start
        self._paused += self.pauses[part]

    def worked(self) -> float:
        """Return the seconds on a clock that excludes pauses; only differences are meaningful."""
        # Pauses are counted apart, so that a save does not look like slow steps.
        return time.perf_counter() - self._paused

    def first_step(self) -> tuple[float, float]:
        """Return the seconds of the first step, and by how many it exceeds the median step.

        Call it before the first reading, when the device has finished the steps.
        """
        if self._first is None:
            return 0.0, 0.0
        first = self._seconds(*self._first[1:])
        # The median, as the first steps compile.
        usual = statistics.median(self._seconds(start, end) for _, start, end in self._spans)
        return first, max(0.0, first - usual)

    def read(self) -> dict[str, Any]:
        """Return the speed since the last reading.

        All ranks call it together, when the device has finished the steps. Its only collective is a
        small gather on the host.
        """
        self.end_phase("other")
        seconds = self._sum_phases()
        # Never 0: a reading without steps must not divide by it.
        working = max(sum(seconds.get(part, 0.0) for part in STEP), 1e-9)
        communication = self._communication()
        reading = {
            "tokens_per_second": round(self._tokens / working, 1),
            "seconds_per_step": round(working / max(self._steps, 1), 6),
            "mfu": self._share(self._flops / working, self._peak),
            "mfu_causal": self._share(self._causal / working, self._peak),
            "matmul_share": self._share(self._flops / working, self.matmul),
            **self._memory.read(),
            "seconds": {part: round(taken, 4) for part, taken in seconds.items()},
            "communication_seconds": {k: round(taken, 4) for k, taken in communication.items()},
            **self._slowest(working - seconds.get("other", 0.0), communication),
            **self._stages(seconds.get("forward_backward", 0.0)),
        }
        self._begin_interval()
        return reading

    def restart(self) -> None:
        """Discard the speed since the last reading; its time still counts in `totals`."""
        self.end_phase("other")
        self._sum_phases()
        if self._pipeline is not None:
            self._pipeline.passes.clear()
        self._begin_interval()

    def slowdown(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """Return the slowdown of steps between `begin` and `end`, relative to the median before.

        The first value is that of the next step after `begin`, the second the mean of those started
        until `end`. Both are fractions, and None without steps before and after `begin`. Times are
        those of `time.perf_counter`. Call it when the device has finished these steps.
        """
        before = [self._seconds(start, end) for host, start, end in self._spans if host < begin]
        after = [span for span in self._spans if span[0] >= begin]
        if not before or not after:
            return None, None
        usual = statistics.median(before)
        during = [self._seconds(*span[1:]) / usual - 1 for span in after if span[0] <= end]
        following = self._seconds(*after[0][1:]) / usual - 1
        return round(following, 4), round(statistics.fmean(during or [following]), 4)

    def _begin_interval(self) -> None:
        self._steps = self._tokens = self._flops = self._causal = 0
        self._phases: list[tuple[Part, Mark, Mark]] = []
        self._reductions: list[tuple[Mark, Mark]] = []

    def _sum_phases(self) -> dict[Part, float]:
        if not isinstance(self._last, float):
            self._last.synchronize()  # short: the device has finished all steps before this mark
        seconds: defaultdict[Part, float] = defaultdict(float)
        for part, start, end in self._phases:
            seconds[part] += self._seconds(start, end)
        for part in seconds:
            self.totals[part] += seconds[part]
        return dict(seconds)

    def _communication(self) -> dict[str, float]:
        """Return the seconds of exposed communication of this rank, as far as they are known."""
        waited = sum((optimizer.waited_seconds for optimizer in self._waiters), 0.0)
        seconds = {"optimizer": waited - self._waited}
        # Optimizers report totals, so each reading takes the difference.
        self._waited = waited
        if self._gradients_known:
            reductions = (self._seconds(start, end) for start, end in self._reductions)
            seconds["gradients"] = sum(reductions, 0.0)
        return seconds

    def _stages(self, passes: float) -> dict[str, Any]:
        """Return the seconds of a step for which each rank of a pipeline computes, and the bubble.

        The bubble is the share of the `passes` for which a rank does not compute, in the mean. Only
        a pipeline has either.
        """
        if self._pipeline is None:
            return {}
        own = sum(self._seconds(*each) for each in self._pipeline.passes)
        self._pipeline.passes.clear()
        # The outermost dimension: ranks of one place in the pipeline are consecutive.
        busy = self._world.gather(own)
        size = len(busy) // self._pipeline.ranks
        means = [statistics.fmean(busy[i : i + size]) for i in range(0, len(busy), size)]
        return {
            "stage_seconds": [round(mean / max(self._steps, 1), 6) for mean in means],
            "bubble": round(1 - statistics.fmean(means) / max(passes, 1e-9), 4),
        }

    def _share(self, flops: float, peak: float | None) -> float | None:
        """Return `flops` per second as a fraction of `peak` times the number of devices."""
        return None if peak is None else round(flops / (peak * self._world.size), 4)

    def _slowest(self, working: float, communication: Mapping[str, float]) -> dict[str, Any]:
        """Return the rank with the longest time for its own work, and its excess over the median.

        All values are None where ranks wait for each other within layers, so that all take equally
        long.
        """
        # Waiting for others is not a rank's own slowness.
        busy = working - sum(communication.values()) if self._gradients_known else None
        by_rank = self._world.gather(busy)
        known = [seconds for seconds in by_rank if seconds is not None]
        if len(known) < max(2, len(by_rank)):
            return {"slowest_rank": None, "slowest_node": None, "slowest_behind": None}
        slowest = max(range(len(known)), key=known.__getitem__)
        return {
            "slowest_rank": slowest,
            "slowest_node": self._ranks[slowest].node,
            "slowest_behind": round(
                known[slowest] / max(statistics.median_low(known), 1e-9) - 1, 4
            ),
        }

    def _mark(self) -> Mark:
        """Return the current time; on a GPU, an event recorded on the stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        # Events cost microseconds; synchronising would stop the device in each phase.
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def _seconds(start: Mark, end: Mark) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        return float(start.elapsed_time(end)) / 1e3  # type: ignore[union-attr,arg-type]


def slow_devices(ranks: Sequence[RankSpeed], tolerated: float) -> Iterator[str]:
    """Yield a line for each rank whose device is slower than the median by more than `tolerated`.

    `tolerated` is a fraction of the median speed.
    """
    # A median is not moved by the slow devices that are looked for.
    usual = statistics.median_high(rank.matmul for rank in ranks)
    for number, rank in enumerate(ranks):
        behind = 1 - rank.matmul / usual
        if behind > tolerated:
            yield (
                f"rank {number} ({rank.node}) runs matrix products "
                f"{behind:.0%} slower than the median rank"
            )
