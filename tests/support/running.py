"""Running dtt as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtt.base.interrupts import STOP_SIGNALS
from support import warm_python
from support.forked import CONTEXT, ForkedDtt, can_fork, run_dtt

ROOT = Path(__file__).resolve().parents[2]

TIMEOUT = 300.0
"""Seconds that anything may take before it counts as hanging: only a hang makes a test wait so
long, and a busy machine may be five times slower than this one."""
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Dtt:
    """Runs `dtt …` as a user would, in one folder."""

    folder: Path

    def __call__(
        self, *arguments: object, expect: int = 0, stdin: str | bytes = b"", **env: str
    ) -> Done:
        """Run to the end; fails unless it exits with `expect`, and on any traceback."""
        done = self._run(stdin.encode() if isinstance(stdin, str) else stdin, *arguments, **env)
        said = f"dtt {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == expect, said
        assert "Traceback" not in done.stderr, said
        return done

    def _run(self, stdin: bytes, *arguments: object, **env: str) -> Done:
        """Run to the end, by the quickest way."""
        given = list(map(str, arguments))
        if can_fork(env):
            done = run_dtt(given, self.folder, env, TIMEOUT, stdin)
            return subprocess.CompletedProcess(given, *done)
        command = [sys.executable, "-m", "dtt.main", *given]
        process = subprocess.run(
            command, cwd=self.folder, env=os.environ | env, input=stdin, capture_output=True,
            timeout=TIMEOUT,
        )  # fmt: skip
        out, err = process.stdout.decode(), process.stderr.decode()
        return subprocess.CompletedProcess(given, process.returncode, out, err)

    def start(self, *arguments: object, **env: str) -> subprocess.Popen[str]:
        """Start `dtt ARGUMENTS`, by the quickest way."""
        if can_fork(env):
            return ForkedDtt(list(map(str, arguments)), self.folder, env)
        return self.start_python("-m", "dtt.main", *arguments, **env)

    def start_python(self, *arguments: object, **env: str) -> subprocess.Popen[str]:
        """Start `python ARGUMENTS`."""
        return self._start(arguments, env, None)

    def start_torchrun(self, ranks: int, *arguments: object, **env: str) -> subprocess.Popen[str]:
        """Start `torchrun --nproc_per_node RANKS ARGUMENTS`, by the quickest way: torchrun is
        itself, but it and dtt are imported already."""
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks)
        program = warm_python.start(CONTEXT) if can_fork(env) else None
        return self._start((*launcher, *arguments), env, program)

    def _start(
        self, arguments: tuple[object, ...], env: dict[str, str], program: Path | None
    ) -> subprocess.Popen[str]:
        """Start Python, or a program in its place."""
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            executable=program, cwd=self.folder, env=os.environ | env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @staticmethod
    def wait(process: subprocess.Popen[str]) -> Done:
        """Wait for the end."""
        out, err = process.communicate(timeout=TIMEOUT)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def in_this_process(folder: Path) -> Iterator[None]:
    """Inside, commands may be called as functions: in `folder`, and deaf to signals afterwards."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with chdir(folder):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Poll for something that another process does; `process` must not end before it is done."""
    end = time.monotonic() + TIMEOUT
    while not true():
        if process is not None and process.poll() is not None:
            assert true(), process.communicate()  # it may have been done since the last look
            return
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def kill_when(true: Callable[[], object], process: subprocess.Popen[str], after: float = 0) -> bool:
    """Kill a process `after` seconds when something is true; return False if it had ended by then.

    A test must repeat what came too late: on busy cores it may sleep for as long as a run takes.
    """
    wait_until(lambda: process.poll() is not None or true())
    time.sleep(after)
    process.kill()
    return Dtt.wait(process).returncode == -signal.SIGKILL


def write_documents(path: Path) -> None:
    """Write 400 short documents, each another, as JSON lines."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (" ".join(words[(i * 7 + j * j) % 10] for j in range(40 + i % 30)) for i in range(400))
    path.write_text(
        "".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines))
    )
