"""Asking a job to save, to save and stop, or for a profile: by a signal, or by touching a file."""

from __future__ import annotations

import json
import signal
import time
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

from dtt.runtime.files import write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log

if TYPE_CHECKING:  # torch is slow to import, and signals are to be heard before
    from dtt.runtime.dist import World

SECONDS_BETWEEN_LOOKS = 0.2
"""At the trigger files: each look may be a question to a file server."""


class Request(IntEnum):
    """What to do after the current step; the largest wish of any rank counts."""

    NONE = 0
    PROFILE = 1
    SAVE = 2
    STOP = 3
    FAILED = 4
    """A save in the background went wrong on some rank."""


class Requests:
    """Collects wishes on this rank; `agreed` makes them every rank's at the same step.

    From construction on, SIGTERM, SIGINT and SIGUSR2 only set a flag: start-up, evaluation and
    saving finish in peace. A SIGINT after any other request ends the process at once.
    """

    def __init__(self) -> None:
        """Signals are heard from here on."""
        self.reason = ""
        self.end = 0
        self.uncompiled = False
        self.profile_kind = ""
        """As the last one who asked for a profile wished; empty: as configured."""
        self._job: JobDir | None = None
        self._looked = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def watch(self, job: JobDir) -> None:
        """Look at the trigger files of `job`, too: `control/stop`, `save` and `profile`."""
        self._job = job

    def agreed(
        self,
        world: World,
        step: int,
        failed: bool = False,
        end: int = 0,
        uncompiled: bool = False,
    ) -> Request:
        """What all ranks do now, after `step`; `failed`: this rank's last save went wrong.

        `end`, the step that the first rank now wants to end the run with (0: no change; other ranks
        say 0), becomes every rank's `end` in the same exchange; so does `uncompiled`, if any rank
        has failed to compile.
        """
        wish = Request.FAILED if failed else self._wish(world)
        most, self.end, any_uncompiled = world.agree_all(wish, end, uncompiled)
        self.uncompiled = bool(any_uncompiled)
        agreed = Request(most)
        if agreed is Request.STOP:  # whoever knows why tells all
            self.reason = world.from_rank(
                self.reason, world.agree(world.rank if self.reason else 0)
            )
        if agreed is Request.PROFILE:
            self.profile_kind = world.from_first(_lines(self._job, "profile")[1:] or [""])[0]
        if world.first and agreed in (Request.PROFILE, Request.SAVE, Request.STOP):
            self._acknowledge(agreed, step)
        return agreed

    def stop_wanted(self, world: World) -> bool:
        """Whether to break off what takes long: the same on every rank that asks now."""
        return world.agree(self._wish(world)) >= Request.STOP

    def stop_asked_here(self) -> bool:
        """Whether this rank alone knows of a wish to stop; asks no other."""
        return bool(self.reason) or (self._job is not None and self._job.stop.exists())

    def _wish(self, world: World) -> Request:
        if self.reason:
            return Request.STOP
        now = time.monotonic()
        if not world.first or self._job is None or now - self._looked < SECONDS_BETWEEN_LOOKS:
            return Request.NONE
        self._looked = now
        if self._job.stop.exists():
            self.reason = _lines(self._job, "stop")[0]
            return Request.STOP
        if self._job.save.exists():
            return Request.SAVE
        return Request.PROFILE if self._job.profile.exists() else Request.NONE

    def _acknowledge(self, request: Request, step: int) -> None:
        """Tell whoever asked that it was heard."""
        if self._job is None:
            return
        name = request.name.lower()
        by = self.reason or _lines(self._job, name)[0]
        log.info("asked to %s by %s, after step %d", name, by, step)
        record = {"request": name, "by": by, "step": step, "time": time.time()}
        try:
            write_atomically(self._job.acknowledged, json.dumps(record) + "\n")
        except OSError as error:
            log.warning("the request could not be acknowledged: %s", error)
        if request == Request.SAVE:
            self._job.save.unlink(missing_ok=True)
        if request == Request.PROFILE:
            self._job.profile.unlink(missing_ok=True)

    def forget(self, world: World) -> None:
        """Remove the trigger files, now that all is saved: they were not meant for the next run."""
        if world.first and self._job is not None:
            self._job.stop.unlink(missing_ok=True)
            self._job.save.unlink(missing_ok=True)
            self._job.profile.unlink(missing_ok=True)


def _lines(job: JobDir | None, name: str) -> list[str]:
    """What the trigger file says: who touched it, and why; then what else there is to know."""
    if job is None:
        return [f"control/{name}"]
    try:
        text = (job.root / "control" / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    first, *others = text.splitlines() or [""]
    return [first if first.strip() else f"control/{name}", *others]
