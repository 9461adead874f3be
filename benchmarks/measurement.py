"""Time alternatives in turns, read the memory of this process, and print tables.

Only the standard library is imported: environments of peers, which lack dtt, load this module too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def in_turns(
    alternatives: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call every alternative once per round and return the results of each by name.

    The alternatives alternate so that other load on the machine affects all alike. The results of
    the first `warm_up` rounds, which fill caches and allocate buffers, are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in alternatives}
    for number in range(warm_up + rounds):
        for name, run in alternatives.items():
            result = run()
            if number >= warm_up:
                results[name].append(result)
    return results


def column_medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _status_bytes(field: str) -> int:
    """Return a size from /proc/self/status (Linux only), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def resident_memory() -> int:
    """Return the resident memory of this process, in bytes."""
    return _status_bytes("VmRSS")


def peak_memory() -> int:
    """Return the peak resident memory of this process since its start or the reset, in bytes."""
    return _status_bytes("VmHWM")


def reset_peak_memory() -> None:
    """Reset the peak to the resident memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")


class Table:
    """A table printed row by row: a left-aligned label, then right-aligned cells."""

    def __init__(self, label: str, label_width: int, columns: Mapping[str, int]) -> None:
        """Print the headings; `columns` maps the heading of each column to its width."""
        self._label_width, self._widths = label_width, tuple(columns.values())
        self.row(label, *columns)

    def row(self, label: str, *cells: str, note: str = "") -> None:
        """Print one row: formatted cells, from the first column on, and a note after them."""
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=False))
        line = f"{label:<{self._label_width}}" + "".join(padded) + (f"  {note}" if note else "")
        print(line.rstrip(), flush=True)
