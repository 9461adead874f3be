"""Measurement of training: time by part, tokens per second, MFU, communication, memory."""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from dtt.artifacts.jobdir import JobDir
from dtt.base.log import log
from dtt.jobs.clock import Clock, PhaseTimer
from dtt.mesh.dist import World
from dtt.mesh.peak_flops import measured_flops, peak_flops
from dtt.mesh.process import in_words
from dtt.model import count
from dtt.model.architecture import AnyArchitecture
from dtt.parallel.pipelining import Pipeline
from dtt.track.base import Record
from dtt.train.process_memory import MemoryMeter

Part = Literal[
    "data", "forward_backward", "optimizer", "evaluate", "tasks", "sample", "save", "profile",
    "other",
]  # fmt: skip
STEP: tuple[Part, ...] = ("data", "forward_backward", "optimizer", "other")
"""Parts of the steps themselves, whose time counts for the reported speed."""
RECENT = 10
"""Number of most recent log lines and saves of which the slowest counts for `lead`."""
Mark = float | torch.cuda.Event
Span = tuple[Mark, Mark]
"""The start and the end of a step on the device."""


@runtime_checkable
class CommunicationTimer(Protocol):
    """An optimizer whose ranks wait for each other's messages."""

    @property
    def waited_seconds(self) -> float:
        """Total waiting time; on a GPU, of the waits that the device has finished."""


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
        self._nodes, speeds = zip(*world.gather((socket.gethostname(), matmul)), strict=True)
        self.matmul = statistics.fmean(speeds)
        """Mean FLOP/s of the devices of the run in matrix products, measured at the start."""
        self._memory = MemoryMeter(self._device)
        self._spans: list[Span] = []
        """The steps before the first reading."""
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
        # Time since the last step, such as logging, belongs to no part of this one.
        self.end_phase("other")
        start = self._last
        yield
        self.end_phase("other")
        if self.steps == len(self._spans):  # until the first reading, which clears them
            self._spans.append((start, self._last))
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
        if not self._spans:
            return 0.0, 0.0
        seconds = [self._seconds(*span) for span in self._spans]
        # The median, as the first steps compile.
        return seconds[0], max(0.0, seconds[0] - statistics.median(seconds))

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
        self._spans.clear()
        self._begin_interval()
        return reading

    def restart(self) -> None:
        """Discard the speed since the last reading; its time still counts in `totals`."""
        self.end_phase("other")
        self._sum_phases()
        if self._pipeline is not None:
            self._pipeline.passes.clear()
        self._begin_interval()

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
            "slowest_node": self._nodes[slowest],
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


class AttemptTimes:
    """The times of an attempt that other processes read.

    They are the sums of the start and of each part of the steps, which the clock writes to
    `clock.json` for `goodput`, and the time before a limit of the job at which a run must be asked
    to save and stop (`lead`).
    """

    def __init__(
        self, job: JobDir, meter: ThroughputMeter, start: PhaseTimer, clock: Clock | None = None
    ) -> None:
        """Create the times; `clock` is that of rank 0, and None on other ranks."""
        self._job, self._meter, self._start, self._clock = job, meter, start, clock
        self._first: int | None = None
        self._logged = False
        self._compiling = 0.0
        self.steps: deque[float] = deque(maxlen=RECENT)
        """Seconds per step of recent log lines."""
        self.saves: deque[float] = deque(maxlen=RECENT)
        """Seconds of recent saves, until they were verified."""

    def start(self, step: int) -> None:
        """Note that training starts after step `step`."""
        self._meter.restart()
        self._first = step
        self._meter.totals.clear()  # the timer of the startup has counted this time

    def startup_record(self) -> Record | None:
        """Return the `start` record on the first call, None after that; log its phases.

        Call it before the first `ThroughputMeter.read`.
        """
        if self._logged:
            return None
        self._logged = True
        first_step, self._compiling = self._meter.first_step()
        phases = {**self._start.seconds, "first step": first_step}
        times = ", ".join(f"{phase} {took:.1f}" for phase, took in phases.items() if took >= 0.05)
        log.info("the first step was done after %.1f s: %s", sum(phases.values()), times)
        return {
            "kind": "start",
            "step": self._first,
            "seconds": {phase: round(seconds, 4) for phase, seconds in phases.items()},
            "matmul_flops": self._meter.matmul,
        }

    def write(self, step: int) -> None:
        """Write the breakdown of the attempt up to `step`."""
        # Ranks wait for each other, so one clock stands for all.
        if self._clock is None:
            return
        parts: defaultdict[str, float] = defaultdict(float, self._meter.totals)
        # The first step compiles: its excess over a usual step counts as part of the start. Moved,
        # not added: the sum of all parts stays the time of the attempt. Not more than there is: on
        # a GPU, part of the excess is the optimizer's, whose kernels are loaded at its first step.
        compiling = min(self._compiling, parts["forward_backward"])
        parts["start"] = sum(self._start.seconds.values()) + compiling
        parts["forward_backward"] -= compiling
        rounded = {part: round(seconds, 3) for part, seconds in parts.items()}
        self._clock.fields = {
            "first": self._first, "step": step, "steps": self._meter.steps, "parts": rounded,
        }  # fmt: skip

    def write_lead(self, after_save: float) -> None:
        """Write `lead`, which a job script reads; call it after a save.

        A run that stops may continue for `after_save` seconds after its last save. On a full disk
        it logs a warning, and the next save writes the file again: ending the run is up to the
        checkpoints.
        """
        try:
            self._job.write_lead(max(self.steps, default=0.0), max(self.saves) + after_save)
        except OSError as error:
            log.warning("lead is not up to date: %s", in_words(error))
