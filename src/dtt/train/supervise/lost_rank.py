"""Diagnosis of a lost rank: its number, its node, and how its process ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base import launcher
from dtt.base.errors import ExitCode, PeerLost
from dtt.base.reading import read_json
from dtt.jobs.attempt import Attempt

PATIENCE = 3.0
"""Seconds to wait for the exit record of the rank that has ended. A connection breaks before
its process is gone, and a file server may show a new attempt.json late."""
ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\]:\d+")
"""Address and port in an error of Gloo: `Connection closed by peer [10.0.0.7]:29500`."""
EXIT_CODE = 49
"""Index in `launcher.stat_fields` of the exit status, in the format of `wait`."""


@contextmanager
def lost_rank_named(attempt: Attempt) -> Iterator[None]:
    """Name the rank that broke a collective by ending, in the error and so in `attempt.json`."""
    from dtt.mesh import dist  # imports torch

    def explain(error: PeerLost) -> PeerLost:
        return explained(error, attempt.job, attempt.number)

    # Before the first step torchrun may end this rank before a collective fails.
    attempt.requests.explain = explain
    try:
        with dist.lost_peers_reported():
            yield
    except PeerLost as error:
        raise explain(error) from None


def explained(error: PeerLost, job: JobDir, attempt: int) -> PeerLost:
    """Return `error` with the lost rank, its node, and its signal or its own error message.

    The end that the lost rank recorded comes first, and its exit code becomes this rank's. A rank
    that was killed recorded none: its exit status is read from /proc if it ran on this node;
    if it ran on another one, the address in the error of Gloo identifies it.
    """
    of_ranks, here = places(job, attempt), socket.gethostname()
    until = time.monotonic() + PATIENCE
    while True:
        record = None
        with suppress(OSError, ValueError):
            record = job.exit_record(attempt)
        # In this order: the rank's own words first, then what the kernel knows, then the network's
        # guess.
        if record is not None:
            lost = PeerLost(
                f"rank {record['rank']} on {record['node']} has ended",
                where=job.attempt_dir(attempt) / "attempt.json",
                why=str(record["reason"]).partition("\n")[0],
                next="see its own message",
            )
            lost.exit_code = ExitCode(record["code"])
            lost.rank, lost.node = record["rank"], record["node"]
            return lost
        # Process ids mean something on this node only.
        for place in of_ranks:
            if place["node"] == here and (how := _end_of(place["pid"])) is not None:
                lost = PeerLost(
                    f"rank {place['rank']} on {here} {how}",
                    why="the system ran out of memory, a user or the scheduler killed it, or it "
                    "crashed",
                    next="see what `dmesg` or the scheduler says; then run the same command again",
                )
                lost.rank, lost.node = place["rank"], here
                return lost
        if time.monotonic() > until:
            return _elsewhere(error, of_ranks)
        time.sleep(0.01)


def places(job: JobDir, attempt: int) -> list[dict[str, Any]]:
    """Return rank, node and pid of every rank, as each wrote them when it started."""
    found = []
    for path in sorted((job.attempt_dir(attempt) / "ranks").glob("*.json")):
        with suppress(OSError, ValueError):
            found.append(read_json(path))
    return found


def _end_of(pid: int) -> str | None:
    """Return a description of how a process ended; None while it runs.

    The kernel keeps the exit status until the parent reaps the process, which torchrun does within
    a tenth of a second.
    """
    if not Path("/proc/self").exists():
        return None
    try:
        fields = launcher.stat_fields(pid)
    # No entry: the parent has reaped it, and with it the status.
    except OSError:
        return "was killed, or crashed"
    # Z is a zombie, X is dead: the process has ended and its status is still there.
    if fields[0] not in "ZX":
        return None
    code = os.waitstatus_to_exitcode(int(fields[EXIT_CODE]))
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )


def _elsewhere(error: PeerLost, of_ranks: list[dict[str, Any]]) -> PeerLost:
    """Return the error for a rank of another node, known by its address; else `error` itself."""
    why = str(error).partition("why:")[2].strip().partition("\n")[0]
    match = ADDRESS.search(why)
    if match is None:
        return error
    node = address = match[1]
    for name in sorted({place["node"] for place in of_ranks} - {socket.gethostname()}):
        with suppress(OSError):
            if any(entry[4][0] == address for entry in socket.getaddrinfo(name, None)):
                node = name
                break
    # Several ranks on that node: which one ended is not known here.
    ranks = [place["rank"] for place in of_ranks if place["node"] == node]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else "a rank"
    among = f", one of {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""
    lost = PeerLost(
        f"{who} on {node} was lost{among}",
        why=why,
        next=f"see the log of {node}, and whether it is up; then run the same command again",
    )
    lost.rank, lost.node = (ranks[0] if len(ranks) == 1 else None), node
    return lost
