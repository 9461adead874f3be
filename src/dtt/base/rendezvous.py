"""File-based rendezvous: collectives and failure detection of ranks that share a file system.

A rank has two files: `words`, to which it appends a line per collective, and `beat`, a heartbeat
that it rewrites every second. Rank 0 collects the lines of all ranks and writes the result into its
own file. It watches every heartbeat; the others watch only that of rank 0. So the load of a rank on
the file server does not grow with the number of ranks, except for rank 0.

An NFS client may cache a file's content, or its absence. It asks the server when a file is opened
or created, so every read reopens the file, and creates it if it does not exist.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dtt.base.errors import ExitCode, PeerLost
from dtt.base.log import log

T = TypeVar("T")

RENDEZVOUS = "rendezvous"
"""Name of the folder that holds one folder per launch."""
BEAT = 1.0
"""Seconds between two heartbeats."""
SILENCE = 7.0
"""Seconds without a heartbeat after which a rank counts as dead."""
START = 300.0
"""Seconds to wait for a rank's first heartbeat: on busy nodes Slurm starts the tasks of a step at
very different times."""
ABANDONED = 60.0
"""Seconds without a heartbeat after which the folder of another launch may be deleted."""


def launch_name(env: Mapping[str, str]) -> str:
    """Return a unique name of this launch: Slurm's cluster, job id, step id and restart count."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return re.sub(r"[^\w.-]", "_", "-".join(env.get(name, "0") for name in names))


class Files:
    """Collectives of the ranks of one launch, through a folder that all of them see.

    When another rank is lost or fails, a thread ends this process, whatever it is doing.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Create `folder`, which belongs to this launch alone, and start the heartbeat thread.

        `close` removes the folder.
        """
        self.rank, self.size = rank, size
        self._folder = folder
        self._offsets = dict.fromkeys(range(size), 0)
        """Byte offset up to which the file `words` of each rank has been read."""
        self._node = socket.gethostname()
        self._beats = 0
        self._stop = threading.Event()
        self._closing = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._show()
        self._watch = threading.Thread(target=self._watch_others, daemon=True)
        self._watch.start()

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier."""
        self.broadcast(None)

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        result: T = self._exchange(None if self.rank else value, lambda words: words[0])
        return result

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank."""
        result: list[T] = self._exchange(value, lambda words: words)
        return result

    def close(self) -> None:
        """Leave the group, so that missing heartbeats do not count as a failure.

        Rank 0 waits for all other ranks and removes the folder.
        """
        if self.rank > 0:
            self._stop.set()
            self._watch.join()
            self._show(left=True)
            return
        self._closing.set()
        self._watch.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._remove_abandoned()

    def fail(self, code: int, reason: str) -> None:
        """Announce to the other ranks that this rank ends with exit code `code`, and why."""
        self._stop.set()
        self._watch.join()
        self._show(code=code, reason=f"rank {self.rank} on {self._node}: {reason}")

    # ---- collectives -----------------------------------------------------------------------------

    def _exchange(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Send a value from each rank to rank 0, and return rank 0's answer."""
        if self.rank > 0:
            self._say(value)
        else:
            words = [value] + [self._hear(rank) for rank in range(1, self.size)]
            self._say(answer(words))
        return self._hear(0)

    def _say(self, value: Any) -> None:
        with self._path(self.rank, "words").open("ab") as file:
            file.write(json.dumps(value).encode() + b"\n")

    def _hear(self, rank: int) -> Any:
        """Wait for the next value from a rank and return it.

        The time between two checks grows with the time waited, from 1 ms to 1 s.
        """
        start = time.monotonic()
        while True:
            with _reopened(self._path(rank, "words")) as file:
                file.seek(self._offsets[rank])
                line = file.readline()
            if line.endswith(b"\n"):
                with suppress(ValueError):  # NFS may show a file's new length before its bytes
                    word = json.loads(line)
                    self._offsets[rank] += len(line)
                    return word
            time.sleep(min(max((time.monotonic() - start) / 10, 1e-3), 1.0))

    # ---- heartbeats ------------------------------------------------------------------------------

    def _show(self, **state: Any) -> None:
        """Rewrite this rank's heartbeat in place: a renamed file might be seen late."""
        self._beats += 1
        content = json.dumps({"beat": self._beats, "node": self._node, **state})
        with suppress(OSError):  # other ranks notice if this lasts
            file = os.open(self._path(self.rank, "beat"), os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.ftruncate(file, os.write(file, content.encode()))
            finally:
                os.close(file)

    def _watch_others(self) -> None:
        """Write heartbeats and check those of the others, using only this node's clock."""
        silent = dict.fromkeys(range(1, self.size) if self.rank == 0 else [0], 0.0)
        beats = dict.fromkeys(silent, b"")
        waiting_told = False
        last = time.monotonic()
        while not self._stop.wait(BEAT):
            self._show()
            now = time.monotonic()
            # limited, as this process may have been suspended
            passed, last = min(now - last, 2 * BEAT), now
            for rank, before in list(beats.items()):
                beats[rank] = self._beat(rank, before)
                silent[rank] = 0.0 if beats[rank] != before else silent[rank] + passed
                state = _parsed(beats[rank])
                if "code" in state:
                    self._end(state["code"], state["reason"], reported=self.rank > 0)
                if state.get("left"):
                    del beats[rank], silent[rank]
                elif silent[rank] > (SILENCE if state else START):
                    self._end(ExitCode.UNFIT, _lost(rank, state))
            missing = [rank for rank, beat in beats.items() if not beat]
            if missing and not waiting_told and silent[missing[0]] > SILENCE:
                waiting_told = True
                log.info(
                    "waiting for %d of %d ranks to start: %s",
                    *(len(missing), self.size, ", ".join(map(str, missing[:10]))),
                )
            if self._closing.is_set() and not beats:
                return

    def _beat(self, rank: int, before: bytes) -> bytes:
        try:
            with _reopened(self._path(rank, "beat")) as file:
                return file.read()
        except OSError:
            return before

    def _end(self, code: int, reason: str, *, reported: bool = False) -> None:
        """End this process and, through rank 0, all others.

        `reported`: another rank has already printed the reason.
        """
        self._show(code=code, reason=reason)
        if not reported:
            os.write(2, f"dtt: {PeerLost(reason)}\n".encode())
        os._exit(code)  # the main thread may be blocked in C++

    # ---- the folder ------------------------------------------------------------------------------

    def _path(self, rank: int, kind: str) -> Path:
        return self._folder / f"{rank:05d}.{kind}"

    def _remove_abandoned(self) -> None:
        """Remove the folders of killed launches, and their parent folder if it is empty."""
        above = self._folder.parent
        with suppress(OSError):
            mark = above / f".now-{self._folder.name}"  # read the file server's clock
            mark.touch()
            now = mark.stat().st_mtime
            mark.unlink()
            for folder in above.iterdir():
                if now - max(p.stat().st_mtime for p in (folder, *folder.iterdir())) > ABANDONED:
                    shutil.rmtree(folder)
            above.rmdir()


def _reopened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT, 0o666), "rb")


def _parsed(beat: bytes) -> dict[str, Any]:
    """Return the content of a heartbeat.

    A partially written one still proves that its rank is alive.
    """
    try:
        state: dict[str, Any] = json.loads(beat) if beat else {}
    except ValueError:
        state = {"node": "?"}
    return state


def _lost(rank: int, state: dict[str, Any]) -> str:
    if not state:
        return f"rank {rank} has not started within {START:.0f} s"
    node = state["node"]
    return f"rank {rank} on {node} is lost: no sign of life for {SILENCE:.0f} s"
