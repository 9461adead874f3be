"""The watchdog thread of each rank: it writes heartbeats and ends runs that hang.

Ranks communicate through files of the attempt, because a hang blocks collectives.

    heartbeat.json                        what the run is doing, from rank 0
    attempts/<n>/ranks/00003.json         node and pid of rank 3, written when it starts
    attempts/<n>/hang                     some rank has made no progress for too long
    attempts/<n>/stacks/rank-00003.txt    stack of each thread of rank 3 at that time
    attempts/<n>/stacks/rank-00003.json   summary of it, with the fields of `REPORT`
    attempts/<n>/judge                    created by the rank that names the culprit
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, ExitCode
from dtt.base.files import write_atomically
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import Kind, read_record
from dtt.base.terminal import Message
from dtt.train.supervise.lost_rank import places

Phase = Literal["start", "step", "evaluate", "sample", "save", "profile", "stop"]

FACTOR = 20
"""A step may take this many times the mean of recent steps, or `hang_seconds` if that is longer."""
RECENT = 50
"""Number of recent steps. The limit uses their mean: on a GPU only some steps wait for the device,
so single steps vary."""
COMPILING = 2
"""Number of first steps of an attempt that have no time limit, because they compile."""
PACKAGE = Path(__file__).parents[2]
# Code that waits for other ranks. It includes autograd, as DDP all-reduces in the backward pass.
WAITING = ("/torch/distributed/", "/torch/autograd/graph.py")


Report = dict[str, Any]
REPORT: dict[str, Kind] = {
    "rank": int, "node": str, "step": int, "phase": str, "seconds": float, "where": str,
    "waiting": bool,
}  # fmt: skip
"""State of a rank when the run hung: `seconds` since its last progress, `where` is the innermost
line of dtt in the stack of its main thread, `waiting` is true if it waits for other ranks."""


class Watchdog:
    """A thread that tracks the main thread's progress and ends the whole run when it hangs.

    A step hangs when it takes longer than `hang_seconds` and longer than `FACTOR` times the mean of
    recent steps. All other phases, and the first `COMPILING` steps, have no limit, on any rank. If
    `hang_seconds` is None or 0, the thread only writes the heartbeat. `attempt` is rank 0's: a rank
    that starts late might find a newer one on disk.
    """

    def __init__(
        self,
        job: JobDir,
        ranks: Ranks,
        steps: int,
        *,
        attempt: int,
        hang_seconds: float | None = 600.0,
        interval: float = 5.0,
        patience: float = 90.0,
    ) -> None:
        """Check every `interval` seconds; wait `patience` seconds for the reports of silent ranks.

        NFS may hide a new file for a minute.
        """
        self._job, self._ranks, self._attempt = job, ranks, attempt
        self._steps = steps
        self.before_end: Callable[[], None] = lambda: None
        """Called before the process ends, so that pending checkpoint writes can finish."""
        self._floor, self._interval, self._patience = hang_seconds, interval, patience
        folder = job.attempt_dir(attempt)
        self._hang, self._judge = folder / "hang", folder / "judge"
        self._stacks = folder / "stacks"
        # Written by the main thread. Each field has one writing thread, so no lock is needed:
        # Python stores an attribute atomically.
        self._phase: Phase = "start"
        self._step = self._steps_done = self._marks = 0
        # A monotonic clock: setting the wall clock must not look like a hang.
        self._progress = self._step_began = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
        # Written by the watchdog thread.
        self._seen_marks = 0
        self._idle = 0.0
        self._alarmed: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        place = {"rank": self._ranks.rank, "node": socket.gethostname(), "pid": os.getpid()}
        try:
            folder = self._job.attempt_dir(self._attempt) / "ranks"
            write_atomically(folder / f"{self._ranks.rank:05d}.json", json.dumps(place) + "\n")
        except OSError as error:  # the file only names the node of a hanging rank
            log.warning("the watchdog cannot write: %s", error)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread; the last heartbeat has the phase `stop`."""
        self._phase = "stop"
        self.beat()
        self._over.set()
        self._thread.join(timeout=self._interval)  # do not wait for a hanging file system

    # ---- called by the main thread ---------------------------------------------------------------

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase inside the context; restore the previous one afterwards."""
        before, began = self._phase, time.monotonic()
        if phase == "step":
            self._step_began = began
        self._phase = phase
        self.beat()
        try:
            yield
        finally:
            self.beat()  # reset the timer while the phase is still exempt
            if before == "step":  # the phase's time does not count for the step
                self._step_began += self._progress - began
            self._phase = before

    def step(self, step: int) -> None:
        """Record that `step` optimizer steps of the run are done."""
        self.beat()
        # The first steps compile for minutes; their times would raise the limit of all later ones.
        if self._steps_done >= COMPILING:
            self._recent.append(self._progress - self._step_began)
        self._step_began = self._progress
        self._step = step
        self._steps_done += 1

    def expect(self, steps: int) -> None:
        """Set the number of steps that the run is expected to end with, for the heartbeat."""
        self._steps = steps

    def beat(self) -> None:
        """Record progress."""
        self._marks += 1
        self._progress = time.monotonic()

    # ---- run by the watchdog thread --------------------------------------------------------------

    def _watch(self) -> None:
        checked, over, working = time.monotonic(), False, True
        while True:
            now = time.monotonic()
            try:
                if self._ranks.first:
                    self._write_heartbeat()
                self._check_progress(now - checked)
                working = True
            except OSError as error:  # saving a checkpoint reports a full disk
                if working:
                    log.warning("the watchdog cannot write: %s", error)
                # One warning per outage, not one every five seconds.
                working = False
            if over:
                return
            checked = now
            over = self._over.wait(self._interval)

    def _write_heartbeat(self) -> None:
        """Write heartbeat.json, without fsync: it is not needed after a power failure."""
        now = time.time()
        record = {
            "time": now,
            "progress": now - (time.monotonic() - self._progress),
            "attempt": self._attempt,
            "phase": self._phase,
            "step": self._step,
            "steps": self._steps,
            "seconds_per_step": self._typical(),
            "world_size": self._ranks.size,
            "node": socket.gethostname(),
            "pid": os.getpid(),
        }
        # A rename, so that a reader never sees half a file.
        aside = self._job.heartbeat.with_name(".heartbeat.json.tmp")
        aside.write_text(json.dumps(record) + "\n")
        aside.replace(self._job.heartbeat)

    def _typical(self) -> float | None:
        recent = list(self._recent)
        return sum(recent) / len(recent) if recent else None

    def _check_progress(self, elapsed: float) -> None:
        """Check progress: raise an alarm, report on one, withdraw one, or end the run."""
        marks = self._marks
        moved = marks != self._seen_marks
        self._seen_marks = marks
        # Limited, so that time when the process was stopped or the machine asleep does not count.
        self._idle = 0.0 if moved else self._idle + min(elapsed, 2 * self._interval)
        if self._alarmed is None:
            excused = self._phase != "step" or self._steps_done < COMPILING
            limit = max(self._floor or 0.0, FACTOR * (self._typical() or 0.0))
            # Any rank may raise the alarm; all look for the file, as their collectives are stuck.
            if self._floor and not excused and self._idle > limit:
                _create(self._hang, self._ranks.rank)
            if self._hang.exists():
                # A rank that saves or evaluates is the one the others wait for. It is no hang.
                if excused:
                    self._withdraw()
                else:
                    self._alarmed = time.monotonic()
                    self._report()
        # Before the test below: a collective may now fail because another rank has ended.
        elif self._judge.exists():
            self._end()
        elif moved or not self._hang.exists():
            if moved:
                self._withdraw()
            self._alarmed, self._idle = None, 0.0
            for suffix in ("json", "txt"):
                self._stack(self._ranks.rank, suffix).unlink(missing_ok=True)
        # A frozen rank never writes a report, and is given up after `patience`.
        elif self._all_reported() or time.monotonic() - self._alarmed > self._patience:
            self._end()

    def _withdraw(self) -> None:
        """Withdraw the alarm: this rank makes progress, and the others only wait for it."""
        log.warning("no hang: rank %d continues, in phase %s", self._ranks.rank, self._phase)
        self._hang.unlink(missing_ok=True)

    def _report(self) -> None:
        """Write this rank's stacks, then its report, which marks that both are complete."""
        rank = self._ranks.rank
        self._stacks.mkdir(exist_ok=True)
        # faulthandler is C and needs no memory, so it works also where Python code would not.
        with self._stack(rank, "txt").open("w") as file:
            faulthandler.dump_traceback(file)
        frames = sys._current_frames()  # noqa: SLF001  its documented name
        where, waiting = _position(frames[threading.main_thread().ident or 0])
        report: Report = {
            "rank": rank, "node": socket.gethostname(), "step": self._step, "phase": self._phase,
            "seconds": self._idle, "where": where, "waiting": waiting,
        }  # fmt: skip
        write_atomically(self._stack(rank, "json"), json.dumps(report) + "\n")

    def _all_reported(self) -> bool:
        return all(self._stack(rank, "json").exists() for rank in range(self._ranks.size))

    def _end(self) -> None:
        """End this process.

        The rank that creates the `judge` file prints and records the reason; the others wait for
        that.
        """
        code, job, attempt = ExitCode.BUG, self._job, self._attempt
        # Exclusive creation decides which rank reports, without messages between ranks.
        if _create(self._judge, self._ranks.rank):
            records = (read_record(path, REPORT) for path in self._stacks.glob("*.json"))
            reports = [one for one in records if one is not None]
            nodes = {place["rank"]: str(place["node"]) for place in places(job, attempt)}
            culprit, why = judge(reports, self._ranks.size, nodes)
            if len(reports) < self._ranks.size:
                code = ExitCode.UNFIT  # a rank that is frozen or gone is lost, which is no bug
            seconds = max((report["seconds"] for report in reports), default=self._idle)
            reason = str(DttError(f"no progress for {seconds:.0f} s: {why}", where=self._stacks))
            print(Message(f"dtt: {reason}"), file=sys.stderr, flush=True)
            node = nodes.get(culprit, "unknown")
            job.end_attempt(code, reason, culprit, attempt=attempt, node=node)
        else:
            deadline = time.monotonic() + self._patience
            while job.exit_record(attempt) is None and time.monotonic() < deadline:
                # torchrun ends all ranks as soon as one ends, and with them the report that the
                # first one still writes.
                time.sleep(self._interval / 10)
            ending = job.exit_record(attempt)
            code = ExitCode.BUG if ending is None else ExitCode(ending["code"])
        # A save in progress needs every rank: without one it can only run into its time limit.
        if self._all_reported():
            self.before_end()
        # Not sys.exit: the main thread is stuck, and this is another thread.
        os._exit(code)

    def _stack(self, rank: int, suffix: str) -> Path:
        return self._stacks / f"rank-{rank:05d}.{suffix}"


def judge(reports: Sequence[Report], size: int, nodes: Mapping[int, str]) -> tuple[int, str]:
    """Return the rank that caused a hang (the first of several), and a sentence that names all.

    Ranks without a report are frozen or gone, and are the cause. Otherwise the cause is the rank
    that does not wait for others; if there are several, those with the fewest steps.
    """

    def named(ranks: Sequence[int], most: int = 8) -> str:
        first = ", ".join(f"rank {rank} ({nodes.get(rank, 'unknown')})" for rank in ranks[:most])
        return first + (f" and {len(ranks) - most} more" if len(ranks) > most else "")

    by_rank = {report["rank"]: report for report in reports}
    if silent := [rank for rank in range(size) if rank not in by_rank]:
        return silent[0], f"{named(silent)} is silent: frozen, or gone"
    suspects = [report for report in reports if not report["waiting"]] or reports
    behind = min(report["step"] for report in suspects)
    culprits = sorted(report["rank"] for report in suspects if report["step"] == behind)
    first = by_rank[culprits[0]]
    why = f"{named(culprits)} is in {first['where']} after step {behind}"
    if len(culprits) < size:
        why += ", and the others wait for it"
    elif first["waiting"]:
        why += ": all wait for each other"
    return culprits[0], why


def _position(innermost: FrameType) -> tuple[str, bool]:
    """Return the innermost line of dtt in a stack, and True if it waits for other ranks."""
    frames = [innermost]
    while (caller := frames[-1].f_back) is not None:
        frames.append(caller)
    package = f"{PACKAGE}{os.sep}"
    in_dtt = next(
        (i for i, f in enumerate(frames) if f.f_code.co_filename.startswith(package)), None
    )
    below = frames if in_dtt is None else frames[:in_dtt]
    waiting = any(part in frame.f_code.co_filename for frame in below for part in WAITING)
    frame = frames[in_dtt or 0]
    file = frame.f_code.co_filename.removeprefix(package)
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})", waiting


def _create(path: Path, rank: int) -> bool:
    """Create `path`; return False if another rank already has."""
    try:
        with path.open("x") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return False
    return True
