"""One attempt at a job: it locks the job folder, and records in `attempt.json` how it ended.

Rank 0 writes attempt.json when the attempt starts. Under Slurm the supervisor begins it before the
set-up of the nodes, and rank 0 adds its fields:
    started             the start, in seconds since 1970
    slurm, restarts     id of the Slurm job whose script runs the attempt (null outside Slurm, and
                        in an allocation for work by hand), and the number of its restarts
    host, pid, ranks    node and process id of rank 0; number of ranks, 0 until they start
    launch              name that all ranks of the launch share: a rank that fails early finds its
                        attempt by it
    saved, stalled      of the supervisor: step of the newest checkpoint at the start; number of
                        attempts in a row that started from it
The rank that ends first completes it; for a command other than `train`, and for an attempt that no
rank has started, the supervisor does:
    ended               the end, in seconds since 1970
    code, reason        the exit code; the error message or the reason of the stop
    step                step of the last record
    rank, node          the rank that ended first, and its node; if it was killed, another rank
                        writes this
    checkpoint          name of the newest checkpoint folder
    asked_by            who requested a stop: the first line of `control/stop`, or the name of a
                        signal; empty if there was no request
    decision, decided   the supervisor's decision, with the reason, `again: …` or `over: …`; its
                        time
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from dtt.artifacts.jobdir import JobDir
from dtt.base import launcher
from dtt.base.errors import DttError, ExitCode, PeerLost
from dtt.base.files import exclusive
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.rendezvous import launch_name
from dtt.base.secrets import redacted
from dtt.jobs.clock import Clock, PhaseTimer, goodput
from dtt.jobs.stop import Requests
from dtt.mesh.process import in_words

MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that are the same on all ranks of a launch."""
SECONDS_FOR_RANK_0 = 60
"""Seconds after which another rank reports its own error, if rank 0 has not ended with it."""


def holding(job: JobDir, ranks: Ranks) -> AbstractContextManager[None]:
    """Return a context manager that locks the job folder on rank 0, so that nobody else trains it.

    It waits up to 10 s for a previous process that is about to end.
    """
    # One lock for all ranks: they belong to one run.
    return exclusive(job.root, "dtt train", patience=10) if ranks.first else nullcontext()


@contextmanager
def after_rank_0(ranks: Ranks, requests: Requests) -> Iterator[None]:
    """Let rank 0 report an error that all ranks raise.

    A launcher ends all ranks as soon as one has ended, and rank 0 may still be importing. The other
    ranks therefore wait up to `SECONDS_FOR_RANK_0` before they raise. If rank 0 has passed the
    checks and started the attempt, the error is this rank's own: it raises at once, and writes
    `attempt.json`, because rank 0 only learns that a rank has ended.
    """
    try:
        yield
    # Each rank that notices is right, and rank 0 may be the one that is gone.
    except PeerLost:  # not raised by all ranks: report it on the rank that detects it first
        raise
    except (DttError, OSError) as error:
        # The signal thread needs it: a stop during the wait should still report the refusal.
        refusal = in_words(error) if isinstance(error, OSError) else error
        requests.refusal = refusal
        until, started = time.monotonic() + SECONDS_FOR_RANK_0, None
        while not ranks.first and started is None and time.monotonic() < until:
            if requests.reason:  # SIGTERM from the launcher: rank 0 has reported the error
                raise SystemExit(refusal.exit_code) from None
            # Slowly: the looks of a thousand ranks should not load the file server.
            time.sleep(0.2)
            started = None if requests.job is None else _started(requests.job)
        if started is not None and requests.job is not None:
            with suppress(OSError):  # the error itself is what must be reported
                requests.job.end_attempt(
                    refusal.exit_code, str(refusal), ranks.rank, attempt=started
                )
        raise


def _launch() -> str:
    """Return a name of the launch that all its ranks share, and later launches rarely have."""
    return "-".join([launch_name(os.environ), *(os.environ.get(name, "") for name in MEETING)])


def _started(job: JobDir) -> int | None:
    """Return the number of the attempt that rank 0 of this launch has announced, if it has."""
    number = job.attempt()
    record = job.attempt_record(number)
    return number if record is not None and record["launch"] == _launch() else None


@dataclass
class Attempt:
    """An attempt: one start of a job."""

    job: JobDir
    requests: Requests
    number: int
    """Number of the attempt, from 1. Ranks other than 0 have 0 until rank 0 sends it to them: if
    they read it from the job folder, they could find the previous attempt."""
    clock: Clock | None = None
    """The clock of the attempt, on rank 0 only."""
    startup: PhaseTimer = field(default_factory=PhaseTimer)
    """Timer of the phases before the first step."""


@contextmanager
def recorded_attempt(
    job: JobDir,
    ranks: Ranks,
    requests: Requests,
    *,
    startup: PhaseTimer | None = None,
    announced: bool = False,
) -> Iterator[Attempt]:
    """Start an attempt, and record in `attempt.json` how it ended.

    `startup` is the phase timer of this process, if one was running already. If `announced`, ranks
    that fail before rank 0 has sent them the number find the attempt by the name of the launch.
    """
    attempt = Attempt(job, requests, 0, startup=startup or PhaseTimer())

    def record(error: DttError) -> None:
        # Ranks that do not know the number yet write nothing: a guess could overwrite another
        # attempt.
        if attempt.number:
            job.end_attempt(error.exit_code, str(error), ranks.rank, attempt=attempt.number)

    with launcher.recording(record):
        if ranks.first:
            # Files of an attempt that was killed, before the number of the new one is chosen.
            job.remove_litter()
            # Before the folder exists: a signal while its first file is written would otherwise
            # end an attempt that nobody has recorded the end of.
            attempt.number = job.next_attempt()
            job.begin_attempt(_launch() if announced else "", ranks.size)
            attempt.clock = Clock(job, attempt.number)
        with _ending_recorded(attempt, ranks):
            yield attempt


@contextmanager
def _ending_recorded(attempt: Attempt, ranks: Ranks) -> Iterator[None]:
    """Write `attempt.json` when the body ends, with or without an error."""
    job = attempt.job
    # Assumed until proven otherwise: an exception that no clause names is a bug. A node of None is
    # that of this rank.
    code, reason, rank, node = ExitCode.BUG, "", ranks.rank, None
    try:
        yield
        code, reason = ExitCode.DONE, "done"
    except (DttError, OSError) as error:
        reported = in_words(error) if isinstance(error, OSError) else error
        code, reason = reported.exit_code, str(reported)
        if isinstance(reported, PeerLost) and reported.node is not None:
            rank, node = ranks.rank if reported.rank is None else reported.rank, reported.node
        raise
    except KeyboardInterrupt:
        code, reason = ExitCode.INTERRUPTED, "interrupted"
        raise
    except SystemExit as end:  # rank 0 has reported why
        code = ExitCode(int(end.code or 0))
        raise
    except Exception as error:
        reason = redacted(f"{type(error).__name__}: {error}")
        raise
    finally:
        # These outcomes are the same on all ranks, and rank 0 records them for all; each rank
        # records any other outcome itself.
        together = code in (ExitCode.DONE, ExitCode.PREEMPTED)
        if attempt.number and (ranks.first or not together):
            try:
                job.end_attempt(
                    code,
                    reason,
                    rank,
                    attempt=attempt.number,
                    node=node,
                    asked_by=attempt.requests.reason,
                )
            # A full disk must not replace the error that ended the run.
            except OSError as error:
                log.warning("attempt.json could not be written: %s", in_words(error))
        if attempt.clock is not None:
            attempt.clock.close()
            if together and (spent := goodput(job)) is not None and spent.useful:
                log.info("goodput: %s", spent.describe())
