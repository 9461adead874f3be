"""Requests to a running job to save, to save and stop, or to profile: signals and trigger files."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.base import launcher
from dtt.base.errors import DttError, PeerLost, Preempted
from dtt.base.files import remove, write_atomically
from dtt.base.interrupts import STOP_SIGNALS
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import retrying
from dtt.jobs.job_files import trigger_lines

if TYPE_CHECKING:  # torch is slow to import, and signals must be handled before
    from dtt.mesh.dist import World

SECONDS_BETWEEN_CHECKS = 0.2
"""Seconds between checks of the trigger files: each check may be a request to a file server."""


class Request(IntEnum):
    """The action to take after the current step; the largest request of any rank wins."""

    NONE = 0
    PROFILE = 1
    SAVE = 2
    STOP = 3
    FAILED = 4
    """A save in the background has failed on some rank."""


@dataclass(frozen=True)
class AgreedRequest:
    """The requests that all ranks have agreed on after a step."""

    request: Request
    end: int
    """Step that the time limit ends the run with; 0: no change."""
    uncompiled: bool
    """True if compilation has failed on any rank."""
    profile_kind: str
    """Kind of profile that a PROFILE request named; empty: as configured."""


class Requests:
    """Requests received by this rank; `agreed` makes all ranks act on them after the same step.

    From construction on, stop signals only set a flag: steps, evaluation and saving finish first.
    A SIGINT after any other request ends the process at once. Before the first step there is
    nothing to save: between `act_at_once` and `defer`, any stop signal ends the process.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        """Install the signal handlers.

        Without `ends_process`, the process is that of a program that continues: only Ctrl-C is
        handled, and before the first step it raises KeyboardInterrupt.
        """
        self.reason = ""
        """Signal, or author, of the stop request; empty without one."""
        self.job: JobDir | None = None
        self._checked = 0.0
        """Time of the last check of the trigger files."""
        self.refusal: DttError | None = None
        """Error that prevents this rank from starting. Rank 0 reports it for all ranks, and the
        launcher ends the others."""
        self.explain: Callable[[PeerLost], PeerLost] = lambda error: error
        """Function that names the rank that was lost, once the attempt has a number."""
        self._wakeup: int | None = None
        """Write end of a pipe that receives the number of every signal, during start-up."""
        self._ends_process = ends_process
        self._early = False
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread only; the trigger files remain
        for number in STOP_SIGNALS if ends_process else (signal.SIGINT,):
            # nohup sets SIGHUP to be ignored, and children inherit that.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C: the user does not want to wait for the save.
        if number == signal.SIGINT and (self.reason or self._early):
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def act_at_once(self, ranks: Ranks) -> None:
        """Let stop signals end the process, until `defer`.

        A thread acts on them, because Python's signal handlers run in the main thread between two
        bytecodes: in a rendezvous, or while a library is loaded, that may take minutes.
        """
        self._early = not self._ends_process
        if self._early or threading.current_thread() is not threading.main_thread():
            return
        reader, self._wakeup = os.pipe()
        # A signal handler must never block on a full pipe.
        os.set_blocking(self._wakeup, False)
        # The C-level handler writes the number at once, whatever the main thread does; the Python
        # handler would wait for the next bytecode.
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._act, args=(reader, ranks), daemon=True)
        thread.start()

    def defer(self) -> None:
        """Let stop signals only set the flag, which the training loop checks from now on."""
        self._early = False
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            # Cleared before the pipe is closed: the thread then takes later bytes for no request.
            writer, self._wakeup = self._wakeup, None
            os.close(writer)

    def _act(self, reader: int, ranks: Ranks) -> None:
        """Read signals from the pipe until it is closed; end the process at the first stop."""
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in STOP_SIGNALS and self._wakeup is not None:
                    name = signal.Signals(number[0]).name
                    error = self.refusal or _ended_early(name, ranks)
                    if isinstance(error, PeerLost):
                        error = self.explain(error)
                    launcher.end(error, silent=not ranks.first)

    def watch(self, job: JobDir) -> None:
        """Also check the trigger files of `job`: `control/stop`, `save` and `profile`."""
        self.job = job

    def agreed(
        self,
        world: World,
        step: int,
        failed: bool = False,
        end: int = 0,
        uncompiled: bool = False,
    ) -> AgreedRequest:
        """Return the action that all ranks take after `step`; all ranks call it together.

        `failed` is True if this rank's last save has failed. The same messages share two more
        values: `end`, the step that rank 0 proposes to end the run with (0: no change; other ranks
        pass 0), and `uncompiled`, True if this rank has failed to compile.
        """
        # A failed save outranks a stop: the stop would save again, on the same full disk.
        own = Request.FAILED if failed else self._own_request(world)
        largest, end, any_uncompiled = world.maxima(own, end, uncompiled)
        request, profile_kind = Request(largest), ""
        # Ranks may have different reasons, such as a signal on one node; all record the same one.
        if request is Request.STOP:  # the highest rank with a reason broadcasts it
            self.reason = world.from_rank(
                self.reason, world.maximum(world.rank if self.reason else 0)
            )
        if request is Request.PROFILE:
            named = trigger_lines(self.job.profile)[1:] if self.job is not None else []
            profile_kind = world.from_first(named or [""])[0]
        if world.first and request in (Request.PROFILE, Request.SAVE, Request.STOP):
            self._acknowledge(request, step)
        return AgreedRequest(request, end, bool(any_uncompiled), profile_kind)

    def stop_wanted(self, world: World) -> bool:
        """Return True if any rank has a request to stop; all ranks call it together.

        For long operations, such as an evaluation, that should end early.
        """
        return world.maximum(self._own_request(world)) >= Request.STOP

    def stop_asked_here(self) -> bool:
        """Return True if this rank has been asked to stop; asks no other rank."""
        return bool(self.reason) or (self.job is not None and self.job.stop.exists())

    def _own_request(self, world: World) -> Request:
        if self.reason:
            return Request.STOP
        # A monotonic clock, as the interval must not depend on the wall clock.
        now = time.monotonic()
        # Rank 0 alone looks at the files: a thousand ranks would load the file server in each step.
        if not world.first or self.job is None or now - self._checked < SECONDS_BETWEEN_CHECKS:
            return Request.NONE
        self._checked = now
        # The most urgent trigger first.
        if self.job.stop.exists():
            self.reason = trigger_lines(self.job.stop)[0]
            return Request.STOP
        if self.job.save.exists():
            return Request.SAVE
        return Request.PROFILE if self.job.profile.exists() else Request.NONE

    def _acknowledge(self, request: Request, step: int) -> None:
        """Log the request and acknowledge it in a file; remove the trigger of a save or profile."""
        if self.job is None:
            return
        name = request.name.lower()
        by = self.reason or trigger_lines(self.job.root / "control" / name)[0]
        log.info("asked to %s by %s, after step %d", name, by, step)
        record = {"request": name, "by": by, "step": step, "time": time.time()}
        try:
            write_atomically(self.job.acknowledged, json.dumps(record) + "\n")
        except OSError as error:
            log.warning("the request could not be acknowledged: %s", error)
        # A stop stays until all is saved: see `forget`.
        if request == Request.SAVE:
            _remove_trigger(self.job.save)
        if request == Request.PROFILE:
            _remove_trigger(self.job.profile)

    def forget(self, world: World) -> None:
        """Remove the trigger files, once all is saved: they are not meant for the next attempt.

        If `control/stop` was written in the meantime, its author becomes the author of the stop: a
        user who does so overrides a job script, after whose request the job would continue.
        """
        if world.first and self.job is not None:
            if self.reason and self.job.stop.exists():
                self.reason = trigger_lines(self.job.stop)[0]
            for trigger in (self.job.stop, self.job.save, self.job.profile):
                _remove_trigger(trigger)


def _remove_trigger(trigger: Path) -> None:
    """Remove a trigger file, or a folder that somebody created in its place."""
    try:
        retrying(lambda: remove(trigger))
    except OSError as error:
        log.warning("a trigger file could not be removed: %s", error)


def _ended_early(name: str, ranks: Ranks) -> DttError:
    """Return the error for a rank that received the signal `name` before its first step.

    torchrun forwards the signals that it receives; only SIGTERM may be its own, after a rank has
    failed. If a user's SIGTERM has ended another rank before this one checks, the stop is taken
    for a failure: the job then resumes although it need not, which does less harm than the reverse.
    """
    if name == "SIGTERM" and launcher.sibling_ended(ranks):
        return PeerLost(
            "another rank on this node has ended before the first step",
            why=f"torchrun sent {name} to the others",
            next="see its own message above; then run the same command again",
        )
    return Preempted(
        "stopped before the first step of this attempt, there was nothing to save",
        why=name,
        next="run the same command again",
    )
