"""Memory of this host, below the limits of all cgroups (v2) that this process is in.

A Slurm job or a container may use much less than the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def free() -> int:
    """Return the bytes that are available."""
    within = (limit - int((folder / "memory.current").read_text()) for folder, limit in _limits())
    return min([psutil.virtual_memory().available, *within])


def total(*, swap: bool = False) -> int:
    """Return the bytes that a process may use at most, and optionally all swap."""
    limits = [limit for _, limit in _limits()]  # of memory; a cgroup limits swap on its own
    bytes_ = min([psutil.virtual_memory().total, *limits])
    return int(bytes_ + (psutil.swap_memory().total if swap else 0))


def _limits() -> Iterator[tuple[Path, int]]:
    """Yield the folder of each cgroup with a limit, and the limit in bytes."""
    root = Path("/sys/fs/cgroup")
    try:
        cgroup = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:  # no Linux
        return
    for folder in (root / cgroup, *(root / cgroup).parents):
        with suppress(OSError, ValueError):  # no limit, or outside of the cgroups
            yield folder, int((folder / "memory.max").read_text())
