"""Log lines and progress bars on stderr, from rank 0; plain text if it is not a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO

from dtt.base.ranks import Ranks
from dtt.base.terminal import Coded, Message, one_line, part_of_message, raw

log = logging.getLogger("dtt")

ERASE_LINE = "\r\x1b[K"
SLOW_IMPORTS = {
    "numpy": "libraries",
    "pyarrow": "libraries",
    "torch": "PyTorch",
    "transformers": "transformers",
    "datasets": "datasets",
    "wandb": "wandb",
}
"""Modules that take seconds to import from a network disk, with the names to log."""


def setup_logging(ranks: Ranks) -> None:
    """Send dtt's log lines to stderr, with the time, and with the date unless it is a terminal.

    Ranks other than 0 log only warnings. With several ranks, each line names its rank. With
    DTT_QUIET=1 (`-q`) all ranks log only warnings.
    """
    who = f"[rank {ranks.rank}] " if ranks.size > 1 else ""
    handler = _Handler(sys.stderr)
    # The log of a job is read days later, and spans several; a terminal shows today.
    date = "" if sys.stderr.isatty() else "%Y-%m-%d "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(message)s", f"{date}%H:%M:%S"))
    log.handlers[:] = [handler]
    log.propagate = False
    quiet = not ranks.first or os.environ.get("DTT_QUIET") == "1"
    log.setLevel(logging.WARNING if quiet else logging.INFO)


@cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line at its first time: a command resolves its configuration several times."""
    log.log(level, "%s", line)


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that makes the values of a log line safe, of which many are names of files."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as dtt's own text, after its values were made safe."""
        if isinstance(record.args, tuple) and record.args:
            record.args = tuple(_safe(value) for value in record.args)
        else:  # it may contain values already
            record.msg = part_of_message(str(record.msg))
        try:
            if self.stream.isatty():  # a progress line may be there
                self.stream.write(Coded(ERASE_LINE))
            self.stream.write(Message(f"{self.format(record)}\n"))
            self.flush()
        except Exception:  # noqa: BLE001  as in the standard library: a log line never ends a run
            self.handleError(record)


def _safe(value: object) -> object:
    if isinstance(value, Path):
        return one_line(value)
    return part_of_message(str(value)) if isinstance(value, str | Exception) else value


def log_on_terminal(message: str, *values: object) -> None:
    """Log what a wait is for, where a person watches; in a file it would only be noise."""
    if sys.stderr.isatty():
        log.info(message, *values)


class ImportLog:
    """A finder of modules that finds none, and logs before a slow library is imported.

    A timer that logs only if an import takes long would be quieter, but could not run: Python holds
    the GIL while it loads the shared libraries of torch, which is most of that time.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Log the import of a slow library; return None, so that Python asks the next finder."""
        what = SLOW_IMPORTS.get(name)
        if what is not None and what not in self._logged:
            # PyTorch and the others import numpy themselves.
            self._logged |= {what, "libraries"}
            log.info("loading %s", what)


Advance = Callable[[int], None]

FIRST_LINE, LATER_LINES = 2.0, 10.0
"""Seconds to the first line of progress, and between lines, where stderr is not a terminal."""


@contextmanager
def progress(what: str, total: int, unit: str = "B", *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of `what`; yield the function `advance(amount)`.

    On a terminal this is a bar with the time left, elsewhere a plain line after 2 seconds and then
    every 10. `unit` "B" is shown as bytes. `shown=False` (ranks other than 0) prints nothing.
    """
    if not shown or not log.isEnabledFor(logging.INFO):
        yield lambda amount: None
    elif sys.stderr.isatty():
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        yield _plain(what, total, unit)


@contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=raw(sys.stderr)), transient=True) as bar:
        task = bar.add_task(one_line(what), total=total)
        yield lambda amount: bar.advance(task, amount)


def _plain(what: str, total: int, unit: str) -> Advance:
    start = time.monotonic()
    last = start - LATER_LINES + FIRST_LINE
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= LATER_LINES:
            last = now
            left = (now - start) * (total - done) / max(done, 1)
            scale, name = (1e6, "MB") if unit == "B" else (1.0, unit)
            log.info(
                "%s: %.0f of %.0f %s, %.0f s left", what, done / scale, total / scale, name, left
            )

    return advance
