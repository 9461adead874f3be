"""Measurement of three steps of a run on random tokens, to check the formulas of `dtt plan`."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil
import torch

from dtt.config.schedule import RunFacts
from dtt.data.samples.loader import MicroBatch
from dtt.estimate.case import Case
from dtt.mesh.dist import World
from dtt.model import attention_backend, count
from dtt.model.scaling import scaled
from dtt.optim import built
from dtt.optim.ema import Ema
from dtt.optim.resolved_schedule import resolve_schedule
from dtt.train.objectives.loss_function import loss_function
from dtt.train.pipelined_step import make_passes
from dtt.train.process_memory import check_memory
from dtt.train.run_plan import RunPlan
from dtt.train.step import update
from dtt.train.trained_model import LaidOutModel, assemble

STEPS = 3
"""Number of steps. The first one compiles and creates the optimizer state; the last one is
timed."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""


@dataclass(frozen=True)
class Measurement:
    """Memory and time of three steps on this rank's device."""

    memory: int
    """Peak bytes, beyond those in use before the model was created."""
    seconds: float
    """Duration of the last step."""


def probe(case: Case, world: World) -> Measurement:
    """Train for `STEPS` steps and measure; all ranks call it together. Nothing is saved."""
    check_memory(case.cfg, case.model, case.sizes, case.precision, world)
    _give_freed_memory_back()
    # Optimizers import it in their first step. It takes tens of MB, which are not to be measured.
    import_module("torch._dynamo")
    before = _in_use(world.device)
    torch.manual_seed(world.rank)
    laid_out = assemble(case.cfg, plan_of(case, world), world)
    run = RandomTraining(case, laid_out, world)
    seconds = 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        run.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds = time.perf_counter() - begin
    return Measurement(_peak(world.device) - before, seconds)


class RandomTraining:
    """Training steps on random tokens, without anomaly guard and throughput meter."""

    def __init__(self, case: Case, laid_out: LaidOutModel, world: World) -> None:
        """Create the optimizers of a model."""
        self._case, self._laid_out, self._device = case, laid_out, world.device
        facts = RunFacts(case.steps, dtype=case.precision.compute_dtype)
        self._optimizers = built.build(case.cfg.optim, laid_out.params, facts)
        decay = case.cfg.train.ema_decay
        self._ema = None if decay is None else Ema(laid_out.params, decay)
        self._passes = make_passes(laid_out.module, case.precision, reduce_each=case.reduces_each)
        self._no_skip = torch.zeros((), device=world.device)
        self._steps = 0

    def step(self) -> None:
        """Do one optimizer step."""
        case, laid_out = self._case, self._laid_out
        shape = (case.accumulation, case.micro_batch, case.cfg.train.seq_len)
        tokens = torch.randint(case.arch.vocab_size, shape, device=self._device)
        micro_batches = [MicroBatch(part, part, None) for part in tokens]
        objective = loss_function(z_loss=case.cfg.train.z_loss)
        self._passes.run(micro_batches, objective, tokens.numel())
        laid_out.params.clip(1.0)
        update(self._optimizers, self._no_skip, step=self._steps, ema=self._ema)
        self._steps += 1


def plan_of(case: Case, world: World) -> RunPlan:
    """Return the `RunPlan` that `make_plan` would make, without data."""
    cfg, step_sizes = case.cfg, case.step_sizes
    return RunPlan(
        sizes=case.sizes,
        scaling=scaled(cfg, case.arch.vocab_size),
        parameters=count.parameters(case.model),
        precision=case.precision,
        compile=case.compiled,
        reduce_each=case.reduces_each,
        attention=attention_backend.describe(
            case.model, world.device, cfg.train.seq_len, cfg.separates_documents
        ),
        tokens=step_sizes.tokens_before(case.steps),
        step_size=step_sizes.describe(case.steps),
        steps=case.steps,
        schedule=resolve_schedule(cfg.schedule, case.steps, step_sizes.tokens_before),
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
    """Reset the peak memory, and return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak
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
