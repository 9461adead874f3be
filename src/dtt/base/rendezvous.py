"""File-based rendezvous: collectives of ranks that share only a file system.

Each rank appends a line per collective to its own file, and holds a lock on it. Rank 0 collects the
lines of all ranks and writes the result into its own file. A rank that waits for another one sees
by its lock that it has ended; a rank that works sees it when it waits for the next time.

An NFS client may cache a file's content, or its absence. It asks the server when a file is opened
or created, so every read reopens the file, and creates it if it does not exist.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dtt.base.errors import ExitCode, PeerLost

T = TypeVar("T")

RENDEZVOUS = "rendezvous"
"""Name of the folder that holds one folder per launch."""
START = 300.0
"""Seconds to wait for a rank's first line: on busy nodes Slurm starts the tasks of a step at very
different times."""


def launch_name(env: Mapping[str, str]) -> str:
    """Return a unique name of this launch: Slurm's cluster, job id, step id and restart count."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return re.sub(r"[^\w.-]", "_", "-".join(env.get(name, "0") for name in names))


class Files:
    """Collectives of the ranks of one launch, through a folder that all of them see."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Create `folder`, which belongs to this launch alone; `close` removes it."""
        self.rank, self.size = rank, size
        self._folder = folder
        self._offsets = dict.fromkeys(range(size), 0)
        """Byte offset up to which the file of each rank has been read."""
        self._shows_end: dict[int, bool] = {}
        """True for each started rank whose lock shows this rank that it has ended."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = self._path(rank).open("ab", buffering=0)
        # Released when this process ends, however it ends. Waits, as others try it for a moment.
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lines, fcntl.LOCK_EX)
        self._say(socket.gethostname())

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier."""
        self.broadcast(None)

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        result: T = self._exchange(None if self.rank else value, lambda values: values[0])
        return result

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank."""
        result: list[T] = self._exchange(value, lambda values: values)
        return result

    def close(self) -> None:
        """Leave the group; rank 0 waits for all other ranks and removes the folder."""
        if self.rank > 0:
            self._say(None)
        else:
            for rank in range(1, self.size):
                self._hear(rank)
        self._lines.close()  # NFS would keep a file that is open, and with it the folder
        if self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # another launch has its folder there
                self._folder.parent.rmdir()

    def fail(self, code: int, reason: str) -> None:
        """Announce to the other ranks that this rank ends with exit code `code`, and why."""
        self._say(f"rank {self.rank} on {socket.gethostname()}: {reason}", code)

    def _exchange(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Send a value from each rank to rank 0, and return rank 0's answer."""
        if self.rank > 0:
            self._say(value)
            return self._hear(0)
        result = answer([value, *(self._hear(rank) for rank in range(1, self.size))])
        self._say(result)
        return result

    def _say(self, value: Any, code: int = ExitCode.DONE) -> None:
        self._lines.write(json.dumps([code, value]).encode() + b"\n")

    def _hear(self, rank: int) -> Any:
        """Wait for the next value from a rank and return it; raise PeerLost if it has ended.

        The time between two checks grows with the time waited, from 1 ms to 1 s.
        """
        start = time.monotonic()
        while True:
            fd = os.open(self._path(rank), os.O_RDONLY | os.O_CREAT, 0o666)
            with os.fdopen(fd, "rb") as file:
                # Before the line is read, which may be the last one of a rank that ends now.
                ended = self._shows_end.get(rank, False) and not _is_locked(file)
                code, value = self._next_line(rank, file)
                if code == ExitCode.DONE and rank not in self._shows_end:
                    # On Lustre mounted with `localflock`, only its own node sees a lock. It runs,
                    # so a lock that looks free from another node will say nothing later either.
                    self._shows_end[rank] = value == socket.gethostname() or _is_locked(file)
                    continue
            if code == ExitCode.DONE:
                return value
            if code is not None and self.rank > 0:
                sys.exit(code)  # rank 0 has printed the reason
            if code is not None:
                error = PeerLost(value)
                error.exit_code = ExitCode(code)
                raise error
            if ended:
                raise PeerLost(f"rank {rank} is lost: its process has ended")
            if self._offsets[rank] == 0 and time.monotonic() - start > START:
                raise PeerLost(f"rank {rank} has not started within {START:.0f} s")
            time.sleep(min(max((time.monotonic() - start) / 10, 1e-3), 1.0))

    def _next_line(self, rank: int, file: BinaryIO) -> tuple[int | None, Any]:
        """Return the exit code and the value of a rank's next line, or None twice."""
        file.seek(self._offsets[rank])
        line = file.readline()
        if line.endswith(b"\n"):
            with suppress(ValueError):  # NFS may show a file's new length before its bytes
                code, value = json.loads(line)
                self._offsets[rank] += len(line)
                return code, value
        return None, None

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank:05d}.lines"


def _is_locked(file: BinaryIO) -> bool:
    """Return True if another process holds the lock of `file`, or if it cannot be known."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
