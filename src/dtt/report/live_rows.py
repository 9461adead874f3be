"""Rows of jobs for live pages: the states of jobs, examined once for all pages that are open."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.base.log import log
from dtt.jobs.job_state import State, Status, examine
from dtt.report.appended_lines import redacted_json
from dtt.track.jsonl import plain

MAX_STREAMS = 64
STATE_SECONDS = 5.0
"""Minimum time between two examinations of the states of jobs."""
IDLE_SHARE = 10
"""Minimum time between two examinations, as a multiple of the CPU time of the last one: the states
of a thousand jobs must not occupy a core of a login node."""
COMPLETE_SECONDS = 300.0
"""Time between two examinations of jobs that have ended and whose files have not changed. Only
Slurm knows if an administrator has started one again."""
GOODBYE_SECONDS = 2.0
"""Maximum time for which `close` waits for streams to end."""


@dataclass(frozen=True)
class LiveRow:
    """The state of a job as live pages show it, as JSON without secrets."""

    complete: str
    """For the list of jobs."""
    verdict: str
    """The part for a report, which knows the progress from the metrics."""


Find = Callable[[], Sequence[JobDir]]
Row = Callable[[Status], dict[str, Any]]
"""Returns the row of a job in the list: its name `job`, its `verdict`, and its progress."""


class RowRefresher:
    """The rows of the jobs that streams follow, refreshed by one thread for all streams."""

    def __init__(self, find: Find, row: Row) -> None:
        """Start no thread yet: the first stream does."""
        self.rows: Mapping[str, LiveRow] = {}
        """The row of each job, by its name. Each refresh replaces the mapping."""
        self.closing = threading.Event()
        self._find = find
        self._row = row
        self._changed = threading.Condition()
        self._streams: list[Sequence[JobDir] | None] = []
        self._thread: threading.Thread | None = None
        self._last_error = ""
        self._ended: dict[JobDir, tuple[list[int], LiveRow]] = {}
        self._last_complete = 0.0

    def enter(self, jobs: Sequence[JobDir] | None) -> bool:
        """Add a stream that follows `jobs` (None: all); return False if there are too many."""
        with self._changed:
            if self.closing.is_set() or len(self._streams) >= MAX_STREAMS:
                return False
            self._streams.append(jobs)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._refresh_forever, daemon=True)
                self._thread.start()
            return True

    def leave(self, jobs: Sequence[JobDir] | None) -> None:
        """Remove a stream that `enter` has added."""
        with self._changed:
            self._streams.remove(jobs)
            if not self._streams:
                self.rows = {}  # they would be out of date when the next stream starts
            self._changed.notify_all()

    def learn(self, statuses: Sequence[Status]) -> None:
        """Take the states that a page shows.

        Without this, a stream could send an older state to a page that has just been made.
        """
        fresh = {str(status.job.root): self._live_row(status) for status in statuses}
        with self._changed:
            for status in statuses:
                self._ended.pop(status.job, None)
            self.rows = {**self.rows, **fresh}

    def close(self) -> None:
        """End the thread, and wait a few seconds until all streams have ended."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._streams, timeout=GOODBYE_SECONDS)

    def _refresh_forever(self) -> None:
        while not self.closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._streams or self.closing.is_set())
                streams = list(self._streams)
            start = time.thread_time()
            try:
                rows = self._read(streams)
            except Exception as error:  # noqa: BLE001  the next refresh may succeed
                if str(error) != self._last_error:  # not again every few seconds
                    bug = not isinstance(error, DttError | OSError)
                    log.warning("cannot read the states of the jobs: %s", error, exc_info=bug)
                self._last_error = str(error)
            else:
                self._last_error = ""
                with self._changed:
                    self.rows = rows if self._streams else {}
            self.closing.wait(max(STATE_SECONDS, IDLE_SHARE * (time.thread_time() - start)))

    def _read(self, streams: Sequence[Sequence[JobDir] | None]) -> dict[str, LiveRow]:
        """Return the rows of all jobs that `streams` follow."""
        if None in streams:
            jobs = list(self._find())
        else:
            jobs = list({job: None for stream in streams for job in stream or ()})
        now = time.monotonic()
        if now - self._last_complete >= COMPLETE_SECONDS:
            self._ended.clear()
            self._last_complete = now
        changes = {job: _change_times(job) for job in jobs}
        ended = dict(self._ended)  # `learn` may change it meanwhile
        known = {job: row for job, (times, row) in ended.items() if times == changes.get(job)}
        rows = {job: known.get(job) for job in jobs}
        for status in examine([job for job in jobs if job not in known]):
            job = status.job
            rows[job] = live = self._live_row(status)
            if _has_ended(status):
                self._ended[job] = changes[job], live
        return {str(job.root): row for job, row in rows.items() if row is not None}

    def _live_row(self, status: Status) -> LiveRow:
        row = plain(self._row(status))
        return LiveRow(*(redacted_json(json.dumps(text)) for text in (row, row["verdict"])))


def _has_ended(status: Status) -> bool:
    """Return True if the state of a job will not change before its files do."""
    live = status.alive or (status.slurm is not None and status.slurm.live)
    return not live and status.state is not State.UNKNOWN


def _change_times(job: JobDir) -> list[int]:
    """Return the times of the last change of the files that a new attempt or submission changes."""
    paths = (job.root, job.attempt_dir(1).parent, job.submissions, job.metrics)
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime_ns)
        except OSError:  # it does not exist yet, or no longer
            times.append(0)
    return times
