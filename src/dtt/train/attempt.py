"""One start of a job: nobody else trains it meanwhile, and `exit.json` says how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from dtt.errors import DttError, ExitCode, PeerLost
from dtt.runtime import launcher
from dtt.runtime.files import exclusive
from dtt.runtime.jobdir import JobDir
from dtt.runtime.laps import Laps
from dtt.runtime.log import log
from dtt.runtime.process import in_words
from dtt.runtime.ranks import Ranks
from dtt.secrets import redacted
from dtt.train.clock import Clock
from dtt.train.goodput import goodput
from dtt.train.stop import Requests

SECONDS_FOR_THE_FIRST = 60
"""Another rank's own error is told after so long, if the first had none."""


def holding(job: JobDir, ranks: Ranks) -> AbstractContextManager[None]:
    """Nobody else trains this job meanwhile; a predecessor that is just stopping is waited for."""
    return exclusive(job.root, "dtt train", patience=10) if ranks.first else nullcontext()


@contextmanager
def after_the_first(ranks: Ranks, requests: Requests) -> Iterator[None]:
    """What fails inside fails alike on all ranks: the first says and records it.

    A launcher ends all ranks as soon as one has ended, and the first may still be importing.
    """
    try:
        yield
    except PeerLost:  # that is seen by whoever sees it first
        raise
    except DttError as error:
        requests.refusal = error
        until = time.monotonic() + SECONDS_FOR_THE_FIRST
        while not ranks.first and time.monotonic() < until:
            if requests.reason:  # the launcher's SIGTERM: the first has said it
                raise SystemExit(error.exit_code) from None
            time.sleep(0.05)
        raise


@dataclass
class Attempt:
    """One start of a job."""

    job: JobDir
    requests: Requests
    number: int
    """0 on other ranks than the first until they are told: a look of their own may find an old
    one."""
    clock: Clock | None = None
    """On the first rank."""
    start: Laps = field(default_factory=Laps)
    """What the time until the first step went into."""


@contextmanager
def attempt(
    job: JobDir,
    ranks: Ranks,
    requests: Requests,
    *,
    timed: bool = False,
    start: Laps | None = None,
) -> Iterator[Attempt]:
    """Begin an attempt; however it ends, `exit.json` says how. `timed`: the clock ends the run.

    `start` is the stopwatch of this start, if it ran before the attempt began.
    """
    this = Attempt(job, requests, 0, start=start or Laps())

    def record(error: DttError) -> None:
        if this.number:
            job.end_attempt(error.exit_code, str(error), ranks.rank, attempt=this.number)

    with launcher.recording(record):
        if ranks.first:
            job.remove_litter()
            this.number = job.begin_attempt()
            this.clock = Clock(job, this.number, timed=timed)
        with _ending_recorded(this, ranks):
            yield this


@contextmanager
def _ending_recorded(this: Attempt, ranks: Ranks) -> Iterator[None]:
    """Write `exit.json` when the body has ended, however it did."""
    job = this.job
    code, reason, (rank, node) = ExitCode.BUG, "", _culprit(None, ranks)
    try:
        yield
        code, reason = ExitCode.DONE, "done"
    except (DttError, OSError) as error:
        told = in_words(error) if isinstance(error, OSError) else error
        code, reason, (rank, node) = told.exit_code, str(told), _culprit(told, ranks)
        raise
    except KeyboardInterrupt:
        code, reason = ExitCode.INTERRUPTED, "interrupted"
        raise
    except SystemExit as end:  # the first rank has said why
        code = ExitCode(int(end.code or 0))
        raise
    except Exception as error:
        reason = redacted(f"{type(error).__name__}: {error}")
        raise
    finally:
        together = code in (ExitCode.DONE, ExitCode.PREEMPTED)  # then the first rank is the last
        if this.number and (ranks.first or not together):
            try:
                job.end_attempt(
                    code,
                    reason,
                    rank,
                    attempt=this.number,
                    node=node,
                    asked_by=this.requests.reason,
                )
            except OSError as error:
                log.warning("exit.json could not be written: %s", in_words(error))
        if this.clock is not None:
            this.clock.close()
            if together and (spent := goodput(job)) is not None and spent.useful:
                log.info("goodput: %s", spent.describe())


def _culprit(error: DttError | None, ranks: Ranks) -> tuple[int, str | None]:
    """Return the rank that an ending is due to and its node, None if it is this one's."""
    if isinstance(error, PeerLost) and error.node is not None:
        return ranks.rank if error.rank is None else error.rank, error.node
    return ranks.rank, None
