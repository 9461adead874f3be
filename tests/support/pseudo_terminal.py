"""Programs in a pseudo-terminal of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # keys such as Ctrl-C become signals to this session
os.execv(sys.argv[1], sys.argv[1:])
"""


def start_dtt(
    arguments: list[str], folder: Path, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start `dtt ARGUMENTS` with more variables; return the process, and the terminal's other end.

    Not `pty.fork`: it copies the process of the tests (ENOMEM), and Popen does not.
    """
    number, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, sys.executable, "-m", "dtt.main", *arguments],
        cwd=folder, env=os.environ | env, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    return process, number


def run_python(code: str, *, stdout: int | None = subprocess.PIPE, **env: str) -> tuple[str, str]:
    """Run a program whose stderr is a terminal; return its stdout, and what the terminal got.

    With a `stdout` of None, that is the terminal, too.
    """
    number, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=terminal if stdout is None else stdout,
        stderr=terminal, env=os.environ | env, text=True, check=True,
    )  # fmt: skip
    os.close(terminal)
    seen = os.read(number, 100_000).decode()
    os.close(number)
    return done.stdout or "", seen
