"""Signals: those that ask a run to save and stop, and Ctrl-C before a command has started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT,
)  # fmt: skip
"""USR1 is what Lightning, submitit and many sbatch scripts send before a time limit, USR2 is dtt's
own. By default each of them ends a process without a checkpoint."""
INTERRUPTED = 130


def end_at_once() -> None:
    """Let Ctrl-C end the process without a traceback, until `raise_interrupts`.

    The imports of a command line take a third of a second, in which nothing is there to be saved.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, as the body of a command expects."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # a closed stderr
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
