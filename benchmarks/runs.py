"""Start many short multi-rank runs of `dtt train` quickly, and observe their phases.

A rank is forked from a process that has done all imports: a start takes one second instead of ten.
It gets the environment variables that torchrun would set, and enters `dtt.main`. `RankPhases`, in
shared memory, holds the current phase of each rank.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import mmap
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._dynamo  # optimizers import it on first use  # noqa: F401
from jobs import free_port, rank_environment, wait_until

from dtt.checkpoint.saver import Saver
from dtt.jobs.stop import Requests
from dtt.main import main
from dtt.train import step as training_step
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.trainer import Trainer

PHASES = (
    "",
    "start-up",
    "first step",
    "step",
    "accumulation",
    "evaluate",
    "sample",
    "save",
    "async flush",
)

GRACE = 30.0
"""Seconds that torchrun gives ranks to end after another one has failed."""


class RankPhases:
    """The phase of each rank in shared memory, now and at the last signal it received."""

    def __init__(self) -> None:
        """Allocate memory for up to 16 ranks, shared with forks."""
        self._memory = mmap.mmap(-1, 64)

    def current(self, rank: int) -> str:
        """Return the current phase of `rank`."""
        phase, flushing = PHASES[self._memory[rank]], self._memory[16 + rank]
        return "async flush" if flushing and phase in ("step", "accumulation") else phase

    def at_signal(self, rank: int) -> str:
        """Return the phase of `rank` at its last signal; empty if it received none."""
        return PHASES[self._memory[32 + rank]]

    def set_current(self, rank: int, phase: str) -> str:
        """Set the phase of `rank` and return the previous one."""
        previous = PHASES[self._memory[rank]]
        self._memory[rank] = PHASES.index(phase)
        return previous

    def set_flushing(self, rank: int, flushing: bool) -> None:
        """Record if a checkpoint is being written in the background."""
        self._memory[16 + rank] = flushing

    def record_signal(self, rank: int) -> None:
        """Record that `rank` received a signal."""
        self._memory[32 + rank] = PHASES.index(self.current(rank))

    @contextmanager
    def during(self, rank: int, phase: str) -> Iterator[None]:
        """Set the phase of `rank` inside the block."""
        previous = self.set_current(rank, phase)
        try:
            yield
        finally:
            self.set_current(rank, previous)


def _record_phases(phases: RankPhases, rank: int) -> None:
    """Patch dtt in this process, a rank, to keep `phases` up to date."""

    def around(owner: Any, name: str, label: Callable[..., str | None]) -> None:
        """Set the phase `label(arguments)` while the context manager `owner.name` is entered."""
        original = getattr(owner, name)

        @contextmanager
        def managed(*arguments: Any, **named: Any) -> Iterator[Any]:
            phase = label(*arguments, **named)
            recording = phases.during(rank, phase) if phase else nullcontext()
            with recording, original(*arguments, **named) as value:
                yield value

        setattr(owner, name, managed)

    labels = {"step": "step", "evaluate": "evaluate", "sample": "sample", "save": "save"}
    around(Watchdog, "phase", lambda self, phase: labels.get(phase))
    first = True  # first step of this attempt
    around(
        training_step,
        "gradient_sync",
        lambda module, last, each: None if last or first else "accumulation",
    )

    original_step, original_init = Trainer.step, Requests.__init__
    original_flush, original_on_signal = Saver._run, Requests._on_signal  # noqa: SLF001

    def step(self: Trainer, *arguments: Any) -> None:
        nonlocal first
        with phases.during(rank, "first step" if first else "step"):
            original_step(self, *arguments)
        first = False

    def flush(self: Saver, *arguments: Any) -> None:
        phases.set_flushing(rank, True)
        original_flush(self, *arguments)
        phases.set_flushing(rank, False)

    def on_signal(self: Requests, *arguments: Any) -> None:
        phases.record_signal(rank)
        original_on_signal(self, *arguments)

    def init(self: Requests) -> None:
        original_init(self)
        phases.set_current(rank, "start-up")

    for owner, name, replacement in (
        (Trainer, "step", step),
        (Saver, "_run", flush),
        (Requests, "_on_signal", on_signal),
        (Requests, "__init__", init),
    ):
        setattr(owner, name, replacement)


@dataclass
class Run:
    """The processes of one start of a job."""

    folder: Path
    """Working directory of the ranks; the job is `jobs/NAME` in it."""
    ranks: int
    arguments: list[str]
    phases: RankPhases = field(default_factory=RankPhases)
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes by rank, negative for a signal."""
    killed_in: list[str] = field(default_factory=list)
    """Phases of ranks that needed SIGKILL after another rank had ended."""

    def start(self) -> Run:
        """Fork the ranks."""
        port = free_port()
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                self._run_rank(rank, port)
            self.pids.append(pid)
        return self

    def _run_rank(self, rank: int, port: int) -> None:
        code = 1
        try:
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.folder)
            if self.ranks > 1:
                os.environ.update(rank_environment(rank, self.ranks, port))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["dtt", *self.arguments]
            _record_phases(self.phases, rank)
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stderr.flush()
            os._exit(code)

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(self.ranks) if rank not in self.codes]

    def wait(self, limit: float = 60.0) -> bool:
        """Wait for the end; return False if nothing ended or failed within `limit` seconds.

        As under torchrun, when one rank fails the others get SIGTERM, and SIGKILL after `GRACE`.
        """
        ended = wait_until(lambda: not self.running() or any(self.codes.values()), limit)
        for rank in self.running():
            os.kill(self.pids[rank], signal.SIGTERM)
        wait_until(lambda: not self.running(), GRACE)
        for rank in self.running():
            self.killed_in.append(self.phases.current(rank))
            self.kill(rank)
        wait_until(lambda: not self.running(), limit)
        return ended

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self.pids[rank], signal.SIGKILL)


@dataclass
class Torchrun(Run):
    """A run under torchrun: it starts slowly, and its phases stay empty."""

    agent: subprocess.Popen[bytes] | None = None

    def wait(self, limit: float = 60.0) -> bool:
        """Wait for the end of torchrun; return False if it does not end within `limit` seconds."""
        return wait_until(lambda: not self.running(), limit)

    def start(self) -> Torchrun:
        """Start torchrun."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        command = [sys.executable, *launcher, "-m", "dtt.main", *self.arguments]
        with (self.folder / "log").open("ab") as log:
            self.agent = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        return self

    def running(self) -> list[int]:
        """Return all ranks until torchrun has ended, then none."""
        assert self.agent is not None
        if self.agent.poll() is None:
            return list(range(self.ranks))
        self.codes = dict.fromkeys(range(self.ranks), self.agent.returncode)
        return []

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank once all ranks have started."""
        wait_until(lambda: not self.running() or len(self._workers()) >= self.ranks, 60)
        if workers := self._workers():
            os.kill(workers[rank], signal.SIGKILL)

    def _workers(self) -> list[int]:
        """Return the process ids of the existing ranks."""
        assert self.agent is not None
        try:
            folder = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}")
            return sorted(map(int, (folder / "children").read_text().split()))
        except OSError:  # torchrun has ended
            return []
