"""Start dtt in the background, on one or more ranks, without the start-up of Python and torch.

A process of `python -m dtt.main` takes 3 s of CPU time before it does anything, and torchrun
twice that for itself. A forked one enters the same `main` at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing import connection, process
from pathlib import Path

from dtt.verify.forked_ranks import rank_variables, rendezvous
from support import forked
from support.running import TIMEOUT, Done, Dtt


class ForkedRun:
    """The ranks of one command. They get the variables that torchrun would set."""

    def __init__(
        self, dtt: Dtt, arguments: tuple[object, ...], ranks: int, last: Sequence[str] = ()
    ) -> None:
        """Start `dtt ARGUMENTS` in the folder of `dtt`; the last rank also gets those in `last`."""
        self._arguments = list(map(str, arguments))
        self._said = tempfile.TemporaryDirectory()
        (Path(self._said.name) / "in").touch()
        self._store = rendezvous() if ranks > 1 else None
        self._ranks = []
        for rank in range(ranks):
            env = rank_variables(rank, ranks, self._store.port) if self._store else {}
            around = forked.surroundings(dtt.folder, env)
            files = (Path(self._said.name, kind) for kind in ("in", f"out{rank}", f"err{rank}"))
            given = [*self._arguments, *(last if rank == ranks - 1 else ())]
            # A daemon ends with pytest, should a test fail before its end.
            started = forked.CONTEXT.Process(target=_run, args=(given, around, *files), daemon=True)
            started.start()
            self._ranks.append(started)

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [rank.pid or 0 for rank in self._ranks]

    def poll(self) -> int | None:
        """Return the exit code of the command, or None while a rank runs."""
        codes = [rank.exitcode for rank in self._ranks]
        if None in codes:
            return None
        return next((code for code in codes if code), 0)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that run."""
        for rank in self._ranks:
            if rank.exitcode is None and rank.pid is not None:
                os.kill(rank.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> Done:
        """Wait for the end; when a rank fails, end the others as torchrun does."""
        while running := [rank.sentinel for rank in self._ranks if rank.exitcode is None]:
            if not connection.wait(running, TIMEOUT):
                self.kill()
                raise TimeoutError(f"dtt {' '.join(self._arguments)}")
            if any(rank.exitcode for rank in self._ranks):
                self.terminate()
        code = self.poll()
        assert code is not None
        out, err = (self._read(kind) for kind in ("out", "err"))
        return subprocess.CompletedProcess(self._arguments, code, out, err)

    def _read(self, kind: str) -> str:
        """Return what all ranks wrote."""
        files = (Path(self._said.name, f"{kind}{rank}") for rank in range(len(self._ranks)))
        return "".join(file.read_text("utf-8") for file in files if file.exists())


def start(dtt: Dtt, *arguments: object, ranks: int = 1, last: Sequence[str] = ()) -> ForkedRun:
    """Start `dtt ARGUMENTS` on `ranks` ranks; the last one also gets the arguments in `last`."""
    return ForkedRun(dtt, arguments, ranks, last)


def run(dtt: Dtt, *arguments: object, ranks: int) -> Done:
    """Run `dtt ARGUMENTS` on `ranks` ranks; fails unless it succeeds."""
    done = start(dtt, *arguments, ranks=ranks).wait()
    assert done.returncode == 0, done.stderr
    return done


def _run(*arguments: object) -> None:
    """Become a process that may have children, which daemons may not."""
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    forked.become_dtt(*arguments)  # type: ignore[arg-type]
