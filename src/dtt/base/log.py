"""Log lines and progress bars on stderr, from rank 0; plain text if it is not a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtt.base.ranks import Ranks

log = logging.getLogger("dtt")

ERASE_LINE = "\r\x1b[K"


def setup_logging(ranks: Ranks) -> None:
    """Send dtt's log lines to stderr.

    Ranks other than 0 log only warnings. With several ranks, each line names its rank. With
    DTT_QUIET=1 (`-q`) all ranks log only warnings.
    """
    who = f"[rank {ranks.rank}] " if ranks.size > 1 else ""
    erase = ERASE_LINE if sys.stderr.isatty() else ""  # a progress line may be there
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s {who}%(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.propagate = False
    quiet = not ranks.first or os.environ.get("DTT_QUIET") == "1"
    log.setLevel(logging.WARNING if quiet else logging.INFO)


Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int, unit: str = "B", *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of `what`; yield the function `advance(amount)`.

    On a terminal this is a bar with the time left, elsewhere a plain line every 10 seconds. `unit`
    "B" is shown as bytes. `shown=False` (ranks other than 0) prints nothing.
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
