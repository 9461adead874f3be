"""Monitoring of this rank's launcher: torchrun, MPI's process manager, or Slurm's step daemon.

A rank outlives a launcher that is killed, as nothing sends it a signal. It would then wait for
peers or a store that never answer, and hold the lock of its job. So a thread watches the launcher
and ends the rank. It is a thread because the main thread may be in C++ for minutes.
PR_SET_PDEATHSIG is not an alternative: it fires when the *thread* of the launcher that created this
process ends.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dtt.base.errors import DttError, PeerLost
from dtt.base.ranks import Launcher, Ranks

VARIABLES: Mapping[Launcher, str] = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pmi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}
"""An environment variable that each launcher sets for its ranks but does not have itself."""
NAMES: Mapping[Launcher, str] = {
    "torchrun": "torchrun",
    "openmpi": "Open MPI's process manager",
    "pmi": "the process manager of MPI",
    "slurm": "Slurm's step daemon",
}
POLL_SECONDS = 0.5
"""Seconds between two checks, if the kernel cannot report the end of a process that is not a
child."""
RECORDING_SECONDS = 5.0
"""Seconds to print a message and write attempt.json before the process ends: a file system may
hang."""

Recorder = Callable[[DttError], object]
_recorders: list[Recorder] = []


def watch(ranks: Ranks) -> None:
    """Start the thread that ends this process when its launcher has ended.

    Ranks that were started by hand (RANK and WORLD_SIZE in a shell) have no launcher.
    """
    variable = VARIABLES.get(ranks.launcher, "")
    if variable not in os.environ:
        return
    pid = find(variable)
    threading.Thread(target=_watch, args=(pid, ranks), name="launcher", daemon=True).start()


def find(variable: str) -> int:
    """Return the process id of the nearest ancestor without `variable` in its environment.

    Shells and profilers between a launcher and its rank have the variable too.
    """
    ancestors = psutil.Process().parents()
    found = next((process for process in ancestors if not _has(process, variable)), None)
    return os.getppid() if found is None else found.pid


def _has(process: psutil.Process, variable: str) -> bool:
    """Return True if a process was started with `variable`; False if the system hides that."""
    try:
        return variable in process.environ()
    except psutil.Error:  # a process of another user, or one that has ended
        return False


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (state) on.

    Raises OSError if the process has ended.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def sibling_ended(ranks: Ranks) -> bool:
    """Return True if another rank of this node has ended, so that torchrun will end the others.

    torchrun does this with SIGTERM, which is also how a user requests a stop. The result
    distinguishes the two.
    """
    if ranks.launcher != "torchrun" or ranks.local_size == 1:
        return False
    try:
        children = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return False
    return sum(_has(child, VARIABLES["torchrun"]) for child in children) < ranks.local_size


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Make `end` call `recorder` with the error before the process ends, inside the context."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


def end(error: DttError, *, silent: bool = False) -> None:
    """End this process immediately with the exit code of `error`, from any thread.

    It does not return. `silent` prints no message.
    """

    def report() -> None:
        if not silent:
            with suppress(OSError):
                os.write(2, f"dtt: {error}\n".encode())
        for recorder in _recorders:
            with suppress(OSError):
                recorder(error)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    reporter.join(RECORDING_SECONDS)
    os._exit(error.exit_code)


def _watch(pid: int, ranks: Ranks) -> None:
    """Wait for the end of process `pid`, the launcher; then end this one."""
    parent = os.getppid()
    if not _store_refuses():
        try:
            select.select([os.pidfd_open(pid)], [], [])
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):  # old kernel, or the system call is blocked
            while os.getppid() == parent and psutil.pid_exists(pid):
                time.sleep(POLL_SECONDS)
    error = PeerLost(
        f"{NAMES[ranks.launcher]} has ended, and with it this rank",
        where=f"rank {ranks.rank} on {socket.gethostname()}",
        why="it was killed, or ran out of memory",
        next="run the same command again",
    )
    end(error, silent=ranks.local_rank > 0)


def _store_refuses() -> bool:
    """Return True if the store of torchrun's agent, and so the agent, is gone.

    The store listens before the agent starts a rank. If the agent ended before this process looked
    up its parent, the parent is now the process that adopts orphans, and torch would try to connect
    to the store for half an hour.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=60).close()
    except ConnectionRefusedError:
        return True
    except (KeyError, ValueError, OSError):  # torch itself reports network errors
        pass
    return False
