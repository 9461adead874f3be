"""Start many short multi-rank runs of `dtt train` quickly, and observe their phases.

A rank is forked from a process that has done all imports: a start takes one second instead of ten.
It gets the environment variables that torchrun would set, and enters `dtt.main`. A `Board` in
shared memory holds the current phase of each rank.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import json
import mmap
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._dynamo  # optimizers import it on first use  # noqa: F401

from dtt.checkpoint.saver import Saver
from dtt.main import main
from dtt.runtime.watchdog import Watchdog
from dtt.train import trainer
from dtt.train.stop import Requests
from dtt.train.trainer import Trainer

DOING = (
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


class Board:
    """The phase of each rank in shared memory, now and at the last signal it received."""

    def __init__(self) -> None:
        """Allocate memory for up to 16 ranks, shared with forks."""
        self._memory = mmap.mmap(-1, 64)

    def doing(self, rank: int) -> str:
        """Return the current phase of `rank`."""
        doing, flushing = self._memory[rank], self._memory[16 + rank]
        return (
            "async flush" if flushing and DOING[doing] in ("step", "accumulation") else DOING[doing]
        )

    def heard(self, rank: int) -> str:
        """Return the phase of `rank` at its last signal; empty if it received none."""
        return DOING[self._memory[32 + rank]]

    def write(self, rank: int, doing: str) -> str:
        """Set the phase of `rank` and return the previous one."""
        before = DOING[self._memory[rank]]
        self._memory[rank] = DOING.index(doing)
        return before

    def flush(self, rank: int, on: bool) -> None:
        """Set if a checkpoint is being written in the background."""
        self._memory[16 + rank] = on

    def hear(self, rank: int) -> None:
        """Record that `rank` received a signal."""
        self._memory[32 + rank] = DOING.index(self.doing(rank))

    @contextmanager
    def during(self, rank: int, doing: str) -> Iterator[None]:
        """Set the phase of `rank` inside the block."""
        before = self.write(rank, doing)
        try:
            yield
        finally:
            self.write(rank, before)


def _show(board: Board, rank: int) -> None:
    """Patch dtt in this process, a rank, to keep `board` up to date."""

    def around(owner: Any, name: str, label: Callable[..., str | None]) -> None:
        """Set the phase `label(arguments)` while `owner.name` runs."""
        original = getattr(owner, name)

        @contextmanager
        def managed(*arguments: Any, **named: Any) -> Iterator[Any]:
            said = label(*arguments, **named)
            saying = board.during(rank, said) if said else nullcontext()
            with saying, original(*arguments, **named) as value:
                yield value

        setattr(owner, name, managed)

    phases = {"step": "step", "evaluate": "evaluate", "sample": "sample", "save": "save"}
    around(Watchdog, "phase", lambda self, phase: phases.get(phase))
    first = True  # first step of this attempt
    around(
        trainer,
        "gradient_sync",
        lambda module, last, each: None if last or first else "accumulation",
    )

    steps, listen = Trainer.step, Requests.__init__
    flush, hear = Saver._run, Requests._on_signal  # noqa: SLF001

    def step(self: Trainer, *arguments: Any) -> None:
        nonlocal first
        with board.during(rank, "first step" if first else "step"):
            steps(self, *arguments)
        first = False

    def run(self: Saver, *arguments: Any) -> None:
        board.flush(rank, True)
        flush(self, *arguments)
        board.flush(rank, False)

    def on_signal(self: Requests, *arguments: Any) -> None:
        board.hear(rank)
        hear(self, *arguments)

    def init(self: Requests) -> None:
        listen(self)
        board.write(rank, "start-up")

    for owner, name, replacement in (
        (Trainer, "step", step),
        (Saver, "_run", run),
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
    board: Board = field(default_factory=Board)
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes by rank, negative for a signal."""
    put_down: list[str] = field(default_factory=list)
    """Phases of ranks that needed SIGKILL after another rank had ended."""

    def start(self) -> Run:
        """Fork the ranks."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                self._become(rank, port)
            self.pids.append(pid)
        return self

    def _become(self, rank: int, port: int) -> None:
        code = 1
        try:
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.folder)
            if self.ranks > 1:
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks),
                    LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                )  # fmt: skip
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["dtt", *self.arguments]
            _show(self.board, rank)
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
            self.put_down.append(self.board.doing(rank))
            self.kill(rank)
        wait_until(lambda: not self.running(), limit)
        return ended

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self.pids[rank], signal.SIGKILL)


@dataclass
class Torchrun(Run):
    """A run under torchrun: it starts slowly, and its board stays empty."""

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


def wait_until(true: Callable[[], object], limit: float, pause: float = 0.001) -> bool:
    """Poll until `true()` holds; return False if it does not within `limit` seconds."""
    end = time.monotonic() + limit
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def make_tokens(folder: Path) -> Path:
    """Create a small token folder with dtt and return its path."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (" ".join(words[(i * 7 + j * j) % 10] for j in range(40 + i % 30)) for i in range(400))
    text = "".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines))
    (folder / "counting.jsonl").write_text(text)
    for command in (
        ["download", "-d", "counting.jsonl"],
        ["tokenize", "-d", "counting.jsonl", "tokenizer.vocab_size=300", "tokenize.out=tokens",
         "tokenize.validation_fraction=0.1", "tokenize.unit_bytes=8192"],
    ):  # fmt: skip
        run = Run(folder, 1, command).start()
        run.wait()
        assert run.codes == {0: 0}, (folder / "log").read_text()
    return folder / "tokens"
