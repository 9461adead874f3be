"""Asking a job to save, or to save and stop: by a signal to any rank, or by touching a file."""

from __future__ import annotations

import signal
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log

if TYPE_CHECKING:  # torch is slow to import, and signals are to be heard before
    from dtt.runtime.dist import World


class Request(IntEnum):
    """What to do after the current step; the largest wish of any rank counts."""

    NONE = 0
    SAVE = 1
    STOP = 2


class Requests:
    """Collects wishes on this rank; `agreed` makes them every rank's at the same step.

    From construction on, SIGTERM, SIGINT and SIGUSR2 only set a flag: start-up, evaluation and
    saving finish in peace. A SIGINT after any other request ends the process at once.
    """

    def __init__(self, job: JobDir) -> None:
        """`job` has the trigger files `control/stop` and `control/save`."""
        self._job = job
        self.reason = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def agreed(self, world: World) -> Request:
        """The wish that all ranks follow now."""
        wish = Request.NONE
        if world.first:
            if self._job.stop.exists():
                self.reason = self.reason or "control/stop"
            elif self._job.save.exists():
                wish = Request.SAVE
        if self.reason:
            wish = Request.STOP
        agreed = Request(world.agree(wish))
        if world.first and agreed != Request.NONE:
            log.info("asked to %s", "save" if agreed == Request.SAVE else "save and stop")
            if agreed == Request.SAVE:
                self._job.save.unlink(missing_ok=True)
        return agreed

    def forget(self, world: World) -> None:
        """Remove the trigger files, now that all is saved: they were not meant for the next run."""
        if world.first:
            self._job.stop.unlink(missing_ok=True)
            self._job.save.unlink(missing_ok=True)
