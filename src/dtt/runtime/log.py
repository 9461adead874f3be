"""Log lines and progress bars: to stderr, from the first rank, plain when not a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtt.runtime.ranks import Ranks

log = logging.getLogger("dtt")

ERASE_LINE = "\r\x1b[K"


def setup_logging(ranks: Ranks) -> None:
    """Send dtt's log lines to stderr; ranks after the first only warn, and say who they are.

    With DTT_QUIET=1 (`-q`) all ranks only warn.
    """
    who = f"[rank {ranks.rank}] " if ranks.size > 1 else ""
    erase = ERASE_LINE if sys.stderr.isatty() else ""  # a live line may stand there
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s {who}%(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.propagate = False
    quiet = not ranks.first or os.environ.get("DTT_QUIET") == "1"
    log.setLevel(logging.WARNING if quiet else logging.INFO)


Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int, unit: str = "B", *, shown: bool = True) -> Iterator[Advance]:
    """Show how far `what` has come; yields `advance(amount)`.

    A bar with rate and time left on a terminal; elsewhere a plain line every 10 seconds. `unit`
    "B" is shown as bytes. `shown=False` (ranks after the first) shows nothing.
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
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _plain(what: str, total: int, unit: str, every: float = 10.0) -> Advance:
    start = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= every:
            last = now
            left = (now - start) * (total - done) / max(done, 1)
            scale, name = (1e6, "MB") if unit == "B" else (1.0, unit)
            log.info(
                "%s: %.0f of %.0f %s, %.0f s left", what, done / scale, total / scale, name, left
            )

    return advance
