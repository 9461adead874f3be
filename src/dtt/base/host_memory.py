"""Memory of this host, below the limits of all cgroups (v2) that this process is in.

A Slurm job or a container may use much less than the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")


def free() -> int:
    """Return the bytes that are available."""
    within = (limit - int((folder / "memory.current").read_text()) for folder, limit in _limits())
    return min([psutil.virtual_memory().available, *within])


def total() -> int:
    """Return the bytes that a process may use at most, and swap."""
    # A cgroup limits swap on its own. All of it counts, so that this is never too little.
    limits = [limit for _, limit in _limits()]
    return int(min([psutil.virtual_memory().total, *limits]) + psutil.swap_memory().total)


def _limits() -> Iterator[tuple[Path, int]]:
    """Yield the folder of each cgroup with a limit, and the limit in bytes."""
    try:
        cgroup = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:  # no Linux
        return
    for folder in (ROOT / cgroup, *(ROOT / cgroup).parents):
        with suppress(OSError, ValueError):  # no limit, or outside of the cgroups
            yield folder, int((folder / "memory.max").read_text())
