"""Measurement of three steps of a run on random tokens, to check the formulas."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil
import torch

from dtt.model import attend, count
from dtt.model.decoder import roles
from dtt.model.scaling import scaled
from dtt.optim import groups, schedule
from dtt.optim.ema import Ema
from dtt.parallel.apply import autocast, clip_gradients, gradient_sync
from dtt.runtime.dist import World
from dtt.train.assemble import Assembled, assemble
from dtt.train.estimate.case import Case
from dtt.train.plan import Plan

STEPS = 3
"""Number of steps. The first one compiles and makes the optimizer state; the last one is timed."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""


@dataclass(frozen=True)
class Measured:
    """Memory and time of three steps on this rank's device."""

    memory: int
    """Peak bytes, beyond those held before the model was made."""
    seconds: float
    """Duration of the last step."""


def probe(case: Case, world: World) -> Measured:
    """Train for `STEPS` steps and measure; all ranks call it together. Nothing is saved."""
    _give_freed_memory_back()
    # Takes tens of MB. Optimizers import it in their first step, which is to be measured without.
    import_module("torch._dynamo")
    before = _in_use(world.device)
    torch.manual_seed(world.rank)
    made = assemble(case.cfg, _plan(case, world), world)
    run = _Steps(case, made, world)
    seconds = 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        run.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds = time.perf_counter() - begin
    return Measured(_peak(world.device) - before, seconds)


class _Steps:
    """Training steps as in `Trainer.step`, without data, anomaly guard and meter."""

    def __init__(self, case: Case, made: Assembled, world: World) -> None:
        self.case, self.made, self.world = case, made, world
        by_role = roles(made.model)
        dtype = case.precision.products
        self.optimizers = groups.build(case.cfg.optim, made.parameters, by_role, dtype)
        decay = case.cfg.train.ema_decay
        self.ema = None if decay is None else Ema(made.parameters, decay)
        self.good = torch.zeros((), device=world.device)

    def step(self) -> None:
        case, world, last = self.case, self.world, self.case.accumulation - 1
        shape = (case.micro_batch, case.cfg.train.seq_len)
        for i in range(case.accumulation):
            tokens = torch.randint(case.arch.vocab_size, shape, device=world.device)
            each = case.cfg.parallel.reduce == "each"
            with gradient_sync(self.made.module, i == last, each):
                with autocast(world.device, case.precision):
                    loss = self.made.module(tokens, tokens) / tokens.numel()
                loss.backward()
        clip_gradients(list(self.made.parameters.values()), 1.0)
        for optimizer in self.optimizers.values():
            optimizer.found_inf = self.good  # type: ignore[attr-defined]  # torch's own name
            optimizer.step()
            optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.good)


def _plan(case: Case, world: World) -> Plan:
    """Return the plan that `make_plan` would make, without data."""
    cfg, stages = case.cfg, case.stages
    return Plan(
        sizes=case.sizes,
        scaling=scaled(cfg, case.arch.vocab_size),
        parameters=count.parameters(case.arch),
        precision=case.precision,
        compile=case.compiled,
        attention=attend.describe(
            case.arch, world.device, cfg.train.seq_len, cfg.data.mask_documents
        ),
        tokens=stages.tokens_before(case.steps),
        step_size=stages.describe(case.steps),
        steps=case.steps,
        schedule=schedule.resolve(cfg.schedule, case.steps, stages.tokens_before),
        data="",
    )


def _give_freed_memory_back() -> None:
    """Make glibc return freed memory to the system at once.

    Otherwise the resident memory, and so the peak, would include memory that was freed before.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:  # another C library
        return
    for option, value in ((M_MMAP_THRESHOLD, 2**16), (M_TRIM_THRESHOLD, 2**16), (M_ARENA_MAX, 1)):
        mallopt(option, value)


def _in_use(device: torch.device) -> int:
    """Reset the peak of memory, and return the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    now = psutil.Process().memory_info()
    return int(now.rss - now.shared)


def _peak(device: torch.device) -> int:
    """Return the peak bytes since `_in_use`.

    On a CPU without file-backed pages: these are loaded code, whose amount only ever grows.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split("\n")
    peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return peak - int(psutil.Process().memory_info().shared)
