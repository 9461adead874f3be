"""A thread that stops a run once an evaluation has reached the target of its recipe."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dtt.artifacts.jobdir import JobDir
from dtt.base.files import remove, write_atomically
from dtt.bench.recipe import ScoreRule
from dtt.bench.run_score import first_reached

SECONDS_BETWEEN_LOOKS = 0.5
BY = "dtt bench"
"""Origin of the request to stop, as the run records it in `asked_by`."""


class TargetWatch:
    """Context manager that watches the metrics of a run and requests its stop at the target.

    The request is `control/stop` of the job. The run then saves and exits with 75. Steps that it
    has trained after the evaluation do not count for the score.
    """

    def __init__(self, job: JobDir, rule: ScoreRule, tasks: Sequence[str]) -> None:
        """Watch `job`; `tasks` are the names of its benchmark tasks."""
        self._job, self._rule, self._tasks = job, rule, tasks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="target", daemon=True)

    def __enter__(self) -> Self:
        """Start watching, unless there is no target."""
        if self._rule.target is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching. A request that the run has not seen any more is withdrawn."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
            remove(self._job.stop)

    def wait(self) -> None:
        """Wait until the target is reached."""
        self._thread.join()

    def _run(self) -> None:
        size = -1
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            # The run has not started, or the disk is full: the next look may succeed.
            with contextlib.suppress(OSError):
                now = self._job.metrics.stat().st_size
                if now == size:
                    continue
                if first_reached(self._job, self._rule, self._tasks) is not None:
                    target = f"{self._rule.label} {self._rule.target:g}"
                    write_atomically(self._job.stop, f"{BY}: {target} is reached\n")
                    return
                size = now
