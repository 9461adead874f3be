"""Sorted files of numbers, merged until a process can hold open all that are left.

Why: whoever takes each range of keys from each unit opens units × ranges files, 4 million for 1 TB,
and reads a few kilobytes from each. Merged, each file is opened once, however many ranges there
are, and read in pieces of a megabyte. It costs one more copy of the keys: up to OPEN_FILES² files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dtt.clean.shingles import U64
from dtt.clean.steps import Steps
from dtt.mesh.comm import Comm

OPEN_FILES = 100
"""Files of a kind that a process holds open; two kinds at a time. macOS allows 256, Linux 1,024."""
MERGED_ROWS = 2**22
"""Rows that a merge holds at once, apart from those of equal keys: about 0.3 GB."""

Rows = npt.NDArray[Any]
"""Rows of numbers, each of 64 bits: a structured array."""


class SortedFile(NamedTuple):
    """A file of a finished step that holds sorted runs of rows."""

    step: str
    ending: str
    runs: Sequence[int] = ()
    """Lengths of the runs; empty: the whole file is one run."""


class SortedFiles:
    """Open files whose runs are sorted by at least the upper 32 bits of the first column.

    Rows of equal keys stay in the order of files, which is that of documents.
    """

    def __init__(self, steps: Steps, files: Sequence[SortedFile], dtype: np.dtype[Any]) -> None:
        """Open each file once."""
        self._empty = np.empty(0, dtype)
        self._field = str((dtype.names or ())[0])
        self._runs: list[Rows] = []
        for file in files:
            rows = steps.array(file.step, file.ending, dtype)
            self._runs += np.split(rows, np.cumsum(file.runs, dtype=np.int64)[:-1])

    def between(self, low: int, high: int) -> Rows:
        """Return the rows with low <= key < high, run by run; both are multiples of 2^32."""
        found = (run[self._at(run, low) : self._at(run, high)] for run in self._runs)
        return np.concatenate([self._empty, *found])

    def chunks(self) -> Iterator[Rows]:
        """Yield all rows, sorted by at least the upper 32 bits of their keys."""
        starts = [0] * len(self._runs)
        share = max(1, MERGED_ROWS // max(1, len(self._runs)))
        while any(start < len(run) for start, run in zip(starts, self._runs, strict=True)):
            # Up to the smallest key that ends a share: no run has more rows below it, and at least
            # one gets that far. Rows with the same upper bits stay together, however many.
            last = min(
                (
                    int(run[self._field][start + share]) >> 32
                    for start, run in zip(starts, self._runs, strict=True)
                    if start + share < len(run)
                ),
                default=2**32 - 1,
            )
            ends = [self._at(run, (last + 1) << 32) for run in self._runs]
            found = zip(self._runs, starts, ends, strict=True)
            rows = np.concatenate([run[start:end] for run, start, end in found])
            yield np.take(rows, sorting(rows[self._field]))
            starts = ends

    def _at(self, run: Rows, key: int) -> int:
        # Not np.searchsorted, which copies all keys that lie between other numbers.
        return bisect_left(run[self._field], key, key=int)


def merge(
    steps: Steps, name: str, files: list[SortedFile], dtype: np.dtype[Any], comm: Comm
) -> list[SortedFile]:
    """Merge files, in their order, until OPEN_FILES are left, and return those; collective.

    The files are not named by ranks, so any number of ranks continues after a kill.
    """
    level = 0
    while len(files) > OPEN_FILES:
        level += 1
        starts = range(0, len(files), OPEN_FILES)
        merged = [SortedFile(f"{name}-{level}-{i:05d}", "rows") for i in range(len(starts))]
        for i in range(comm.rank, len(starts), comm.size):
            if not steps.done(merged[i].step):
                some = SortedFiles(steps, files[starts[i] : starts[i] + OPEN_FILES], dtype)
                steps.write(merged[i].step, {"rows": some.chunks()})
        comm.barrier()
        files = merged
    return files


def sorting(keys: U64) -> npt.NDArray[np.int64]:
    """Return the order of keys by at least their upper 32 bits, and then by their places.

    So equal keys stay in their order. A stable argsort takes five times as long.
    """
    places = np.uint64((1 << max(len(keys) - 1, 0).bit_length()) - 1)
    packed = keys & ~places | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed & places).view(np.int64)
