"""Finished steps of a run: files of raw numbers, each with its hash in a marker written last.

Steps with sorted files are merged until a process can hold open all that are left. Why: whoever
takes each range of keys from each unit opens units × ranges files, 4 million for 1 TB, and reads a
few kilobytes from each. Merged, each file is opened once, however many ranges there are. It costs
one more copy of the keys: up to OPEN_FILES² files.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dtt.artifacts.manifest import Record
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.files import has_sha256, named, replacing
from dtt.base.reading import read_small
from dtt.clean.shingles import U64
from dtt.mesh.comm import Comm, Serial

OPEN_FILES = 100
"""Files of a kind that a process holds open; two kinds at a time. macOS allows 256, Linux 1,024."""

Rows = npt.NDArray[Any]
"""Rows of numbers, each of 64 bits: a structured array."""
Files = Mapping[str, Iterable[bytes | npt.NDArray[Any]]]
"""The files of a step by the ending of their names, each in pieces."""


class StepMarker(Record):
    """The marker of a finished step."""

    key: str
    """The key of the steps that it belongs to; with another one it is redone."""
    files: dict[str, str]
    """The sha256 of each of its files, by the ending of the name."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Counts that the steps after it need."""


class Steps:
    """The folder of the finished steps of one selection.

    The ranks share it. Each step is done by one rank, which writes files of its own, by rename. No
    file is named by a rank, so any number of ranks continues after a kill.
    """

    def __init__(self, selection: Path, key: str, comm: Comm | None = None) -> None:
        """Use the work folder of the selection in folder `selection`.

        `key` is a fingerprint of everything that determines the files of all steps.
        """
        self._folder, self._key = selection / SelectionManifest.work, key
        self.comm = comm or Serial()

    def path(self, name: str, ending: str) -> Path:
        """Return the path of a file of a step."""
        return self._folder / f"{name}.{ending}"

    def done(self, name: str) -> bool:
        """Return True if the step is finished and each of its files has its hash."""
        marker = _marker(self.path(name, "json"))
        return (
            marker is not None
            and marker.key == self._key
            and all(
                has_sha256(self.path(name, end), sha256) for end, sha256 in marker.files.items()
            )
        )

    def each(self, names: Sequence[str], make: Callable[[int], Files]) -> None:
        """Do the steps that are not finished, each in one rank; collective.

        `make` returns the files of a step, given its place in `names`.
        """
        for place in range(self.comm.rank, len(names), self.comm.size):
            if not self.done(names[place]):
                self.write(names[place], make(place))
        self.comm.barrier()

    def write(self, name: str, files: Files, facts: dict[str, Any] | None = None) -> None:
        """Write the files of a step in order, each from its pieces, and then its marker.

        The pieces of a file may change the files after it, and `facts`.
        """
        sums = {ending: self._write(self.path(name, ending), files[ending]) for ending in files}
        marker = StepMarker(key=self._key, files=sums, facts=facts or {})
        content = f"{marker.model_dump_json(indent=1)}\n".encode()
        self._write(self.path(name, "json"), [content])

    def _write(self, path: Path, pieces: Iterable[bytes | npt.NDArray[Any]]) -> str:
        """Write a file by rename, piece by piece; return its sha256.

        Without fsync, which took a third of the time: what a machine loses when it crashes does not
        have its hash, and is made again.
        """
        digest = hashlib.sha256()
        with replacing(path, synced=False) as file:
            for piece in pieces:
                content = piece if isinstance(piece, bytes) else piece.tobytes()
                digest.update(content)
                file.write(content)
        return digest.hexdigest()

    def facts(self, name: str) -> dict[str, Any]:
        """Return the counts of a finished step; raise StorageError if its marker is gone."""
        path = self.path(name, "json")
        with named(path):
            return StepMarker.model_validate_json(read_small(path)).facts

    def array(self, name: str, ending: str, dtype: Any) -> npt.NDArray[Any]:
        """Return the numbers in a file of a finished step, mapped into memory."""
        path = self.path(name, ending)
        with named(path):
            if path.stat().st_size == 0:  # which cannot be mapped
                return np.empty(0, dtype)
            # A plain view, because slices of np.memmap take ten times as long.
            return np.asarray(np.memmap(path, dtype, "r"))


def _marker(path: Path) -> StepMarker | None:
    try:
        return StepMarker.model_validate_json(read_small(path))
    except (OSError, ValueError):  # also another user's, which may be unreadable
        return None


def have_unread(selection: Path) -> bool:
    """Return True if a finished step has left out documents that cannot be read."""
    markers = map(_marker, (selection / SelectionManifest.work).glob("*.json"))
    return any(marker.facts.get("unread") for marker in markers if marker is not None)


def tidy(selection: Path, kept: Collection[str] | None = None) -> None:
    """Remove leftovers of killed processes from the folder of a selection.

    With `kept`, also remove all other steps than these. Of a finished selection, those of pass 1
    are kept, as they take the longest: a damaged selection is made again without the corpus being
    read. The files of the others are about as large as the corpus.
    """
    for path in (*(selection / SelectionManifest.work).glob("*"), *selection.glob(".*.tmp")):
        if path.name.startswith("."):
            gone = path.suffix == ".tmp"
        else:
            gone = kept is not None and path.stem not in kept
        if gone and path.is_file():
            path.unlink(missing_ok=True)


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

        def at(run: Rows, key: int) -> int:
            # Not np.searchsorted, which copies all keys that lie between other numbers.
            return bisect_left(run[self._field], key, key=int)

        found = (run[at(run, low) : at(run, high)] for run in self._runs)
        return np.concatenate([self._empty, *found])

    def chunks(self, bounds: Sequence[int]) -> Iterator[Rows]:
        """Yield the rows between each two bounds, sorted by at least the upper 32 bits of keys."""
        for low, high in pairwise(bounds):
            rows = self.between(low, high)
            yield np.take(rows, sorting(rows[self._field]))


def merged(
    steps: Steps,
    name: str,
    files: list[SortedFile],
    dtype: np.dtype[Any],
    bounds: Sequence[int],
) -> list[SortedFile]:
    """Merge files, in their order, until OPEN_FILES are left, and return those; collective.

    `bounds` divide the keys, so that the rows between two of them fit into memory.
    """
    level = 0
    while len(files) > OPEN_FILES:
        level += 1
        groups = [files[i : i + OPEN_FILES] for i in range(0, len(files), OPEN_FILES)]
        names = [f"merged-{name}-{level}-{i:05d}" for i in range(len(groups))]

        def rows(place: int, groups: list[list[SortedFile]] = groups) -> Files:
            return {"rows": SortedFiles(steps, groups[place], dtype).chunks(bounds)}

        steps.each(names, rows)
        files = [SortedFile(step, "rows") for step in names]
    return files


def sorting(keys: U64) -> npt.NDArray[np.int64]:
    """Return the order of keys by at least their upper 32 bits, and then by their places.

    So equal keys stay in their order. A stable argsort takes five times as long.
    """
    places = np.uint64((1 << max(len(keys) - 1, 0).bit_length()) - 1)
    packed = keys & ~places | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed & places).view(np.int64)
